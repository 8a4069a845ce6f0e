//! What is said where there is no GPU.

use decide::inventory::Inventory;

/// Where a list of GPUs is empty.
pub fn no_gpu(inventory: &Inventory) -> String {
    match others(inventory) {
        Some(others) => format!("No GPU that vfiod serves on this node{others}."),
        None => "No GPU on this node.".to_owned(),
    }
}

/// Where nothing could be moved.
pub fn no_gpu_to_move(inventory: &Inventory) -> String {
    match others(inventory) {
        Some(others) => format!("No GPU that vfiod serves on this node{others}: nothing to do.\n"),
        None => "No GPU on this node that could be moved (those in an IOMMU group can): nothing to do.\n"
            .to_owned(),
    }
}

/// Display controllers and accelerators of vendors that no row of the table speaks of; nothing where GPUs are served.
fn others(inventory: &Inventory) -> Option<String> {
    if inventory.offerable().next().is_some() {
        return None;
    }
    let base = |class: u32| class >> 16;
    let others =
        inventory.functions.values().filter(|function| matches!(base(function.class.0), 0x03 | 0x12));
    let texts: Vec<_> =
        others.map(|f| format!("{} ({:04x}:{:04x})", f.address, f.vendor, f.device)).collect();
    (!texts.is_empty()).then(|| format!("; not served: {}", texts.join(", ")))
}
