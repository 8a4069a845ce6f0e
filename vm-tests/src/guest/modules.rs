//! Loads kernel modules, as `insmod` does.

use std::ffi::CString;
use std::fs::{self, File};

use nix::kmod::{ModuleInitFlags, finit_module};

use super::failure::{Step, io_on};
use super::paths;
use crate::node::Node;

/// Loads every module of the initramfs in the order that the host wrote down; `fakepci` with the node's functions.
///
/// The host's drivers come last, so that the functions are bound by the kernel's own matching.
pub fn load_all(node: &Node) -> Step {
    let order = format!("{}/order", paths::MODULES);
    let names = fs::read_to_string(&order).map_err(io_on("read", order))?;
    for name in names.lines() {
        let parameter = if name == "fakepci.ko" { node.module_parameter() } else { String::new() };
        load(&format!("{}/{name}", paths::MODULES), &parameter)?;
    }
    Ok(())
}

fn load(path: &str, parameter: &str) -> Step {
    let file = File::open(path).map_err(io_on("open", path))?;
    let parameter = CString::new(parameter).unwrap_or_default();
    finit_module(&file, &parameter, ModuleInitFlags::empty()).map_err(|e| io_on("load", path)(e.into()))
}
