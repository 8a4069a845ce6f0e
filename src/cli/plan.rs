//! `vfiod plan`: what would be done, step by step. Touches nothing.

use std::fmt::Write as _;

use super::{End, Failure, LookArgs, Output, emit, emit_json, places::Places, runtime};
use crate::{
    config::Config,
    desired::Desired,
    plan::{GroupPlan, Plan, Verdict, plan},
};

pub fn run(args: &LookArgs) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let journal = places.journal()?;
    let inventory = places.observe()?;
    let usage = runtime()?.block_on(places.usage(&journal, Config::default().pod_resources_deadline));
    let desired = args.wish.desired();
    let plan = plan(&inventory, &desired, &usage, &journal.priors);
    match args.output.output {
        Output::Json => emit_json(&plan)?,
        Output::Table => emit(&text(&plan, &desired))?,
    }
    Ok(if plan.refused() { End::Refused } else { End::Done })
}

fn text(plan: &Plan, desired: &Desired) -> String {
    let mut out = String::new();
    if plan.groups.is_empty() {
        out.push_str(
            "No GPU on this node that could be moved (those in an IOMMU group can): nothing to do.\n",
        );
    }
    for group in &plan.groups {
        out.push_str(&group_text(group));
    }
    let moves = plan.moves().count();
    if !plan.groups.is_empty() && moves == 0 && !plan.refused() {
        let _ = writeln!(out, "\nThis node is as {} wants it: nothing to do.", desired.workload_type);
    }
    out
}

/// One group's plan in words.
pub fn group_text(plan: &GroupPlan) -> String {
    let functions: Vec<_> = plan.functions.iter().map(ToString::to_string).collect();
    let mut out = match plan.group {
        Some(group) => format!("group {group} ({}): ", functions.join(" ")),
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
        Verdict::Move { loads, moves } => {
            out.push_str("all of it moves, or nothing\n");
            for load in loads {
                let options =
                    if load.options.is_empty() { String::new() } else { format!(" ({})", load.options) };
                let _ = writeln!(out, "  load module {}{options}, unless it is there by then", load.module);
            }
            for step in moves {
                let from = step.from.driver.as_deref().unwrap_or("no driver");
                let _ = writeln!(out, "  {}  {from} -> {}", step.address, step.to);
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
