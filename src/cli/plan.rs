//! `vfiod plan`: what would be done, step by step. Touches nothing.

use std::fmt::Write as _;

use decide::{
    inventory::Inventory,
    plan::{Plan, UnitPlan, Verdict, plan},
    wish::Desired,
};

use super::{
    End, Failure, LookArgs, Output, emit, emit_json,
    nothing::no_gpu_to_move,
    places::{Places, looked_for},
    runtime,
};

pub fn run(args: &LookArgs) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let config = places.config()?;
    let desired = looked_for(&args.wish, &config)?;
    let journal = places.journal()?;
    let inventory = places.observe(&config)?;
    let usage = runtime()?.block_on(places.usage(&journal, config.pod_resources_deadline));
    let plan = plan(&inventory, &desired, &usage, &journal.priors);
    match args.output.output {
        Output::Json => emit_json(&plan)?,
        Output::Table => emit(&text(&plan, &desired, &inventory))?,
    }
    Ok(if plan.refused() { End::Refused } else { End::Done })
}

fn text(plan: &Plan, desired: &Desired, inventory: &Inventory) -> String {
    let mut out = String::new();
    if plan.units.is_empty() {
        out.push_str(&no_gpu_to_move(inventory));
    }
    for unit in &plan.units {
        out.push_str(&unit_text(unit));
    }
    for stale in &plan.stale {
        let _ = writeln!(out, "StalePrior: {stale}");
    }
    let moves = plan.moves().count();
    if !plan.units.is_empty() && moves == 0 && !plan.refused() {
        let _ = writeln!(out, "\nThis node is as {} wants it: nothing to do.", desired.workload_type);
    }
    out
}

/// One unit's plan in words.
pub fn unit_text(plan: &UnitPlan) -> String {
    let functions: Vec<_> = plan.functions.iter().map(ToString::to_string).collect();
    let mut out = match plan.group {
        Some(_) => format!("{} ({}): ", plan.name(), functions.join(" ")),
        None => format!("{}: ", functions.join(" ")),
    };
    match &plan.verdict {
        Verdict::Right => out.push_str("nothing to do\n"),
        Verdict::Refused { refusals } => {
            out.push_str("refused\n");
            for refusal in refusals {
                let _ = writeln!(out, "  {}: {refusal}", refusal.code());
            }
        }
        Verdict::Move { steps } => {
            out.push_str("all of it moves, or nothing\n");
            for step in steps {
                let _ = writeln!(out, "  {step}");
            }
        }
    }
    for note in &plan.notes {
        let _ = writeln!(out, "  note: {note}");
    }
    for address in &plan.boot_bound {
        let _ = writeln!(
            out,
            "  BoundAtBoot: {address} stays on vfio: the kernel bound it by ids at boot (vfio-pci.ids= on the command \
             line, or an options line in modprobe.d); take it out there, or set adoptBootBound"
        );
    }
    out
}
