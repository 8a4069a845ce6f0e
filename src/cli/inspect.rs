//! `vfiod inspect`: what is there, and what is or would be offered.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use clap::Args;
use decide::{
    inventory::Inventory,
    names::Naming,
    offers::{Offer, View, offers},
    plan::plan,
    refusal::Refusal,
    usage::{User, Users},
};
use reason::{Code, Reason};
use serde::Serialize;
use vfio::{
    iommu::Group,
    pci::{Address, Function, Role},
};

use super::{
    End, Failure, LookArgs, Output,
    details::{Detail, detail, detail_text},
    emit, emit_json,
    nothing::no_gpu,
    places::{Places, looked_for, naming},
    runtime,
    table::{or_dash, render},
};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Show these functions in detail (0000:3b:00.0): ids, BARs, link, slot, topology, reset, framebuffer, holders
    #[arg(value_name = "FUNCTION")]
    functions: Vec<Address>,
    #[command(flatten)]
    look: LookArgs,
}

#[derive(Debug, Serialize)]
struct Inspection<'a> {
    functions: Vec<FunctionRow<'a>>,
    unreadable: &'a BTreeMap<Address, String>,
    groups: Vec<GroupRow<'a>>,
    offers: Vec<Offer>,
    iommu: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    details: Vec<Detail<'a>>,
}

#[derive(Debug, Serialize)]
struct FunctionRow<'a> {
    #[serde(flatten)]
    function: &'a Function,
    role: Role,
    name: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct GroupRow<'a> {
    #[serde(flatten)]
    group: &'a Group,
    viable: bool,
    reasons: Vec<Reason>,
    users: Vec<User>,
}

pub fn run(InspectArgs { functions, look: args }: &InspectArgs) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let config = places.config()?;
    let desired = looked_for(&args.wish, &config)?;
    let journal = places.journal()?;
    let inventory = places.observe(&config)?;
    let usage = runtime()?.block_on(places.usage(&journal, config.pod_resources_deadline));
    let naming = naming(&places.host, &config)?;
    let plan = plan(&inventory, &desired, &usage, &journal.priors);
    let trouble = BTreeMap::new();
    let view = View {
        inventory: &inventory,
        desired: &desired,
        plan: &plan,
        usage: &usage,
        pods_silent: false,
        naming: &naming,
        trouble: &trouble,
    };
    let details = functions
        .iter()
        .map(|address| detail(&places.host, &inventory, &naming, *address))
        .collect::<Result<Vec<_>, Failure>>()?;
    let users = usage.of(&inventory);
    let inspection = Inspection {
        functions: function_rows(&inventory, &naming),
        unreadable: &inventory.unreadable,
        groups: inventory.groups.values().map(|group| group_row(&inventory, &users, group)).collect(),
        offers: offers(view),
        iommu: !inventory.groups.is_empty(),
        details,
    };
    match args.output.output {
        Output::Json => emit_json(&inspection)?,
        Output::Table if !inspection.details.is_empty() => {
            let texts: Vec<_> = inspection.details.iter().map(detail_text).collect();
            emit(&texts.join("\n"))?;
        }
        Output::Table => emit(&tables(&inspection, &inventory, desired.workload_type))?,
    }
    Ok(End::Done)
}

fn function_rows<'a>(inventory: &'a Inventory, naming: &'a Naming) -> Vec<FunctionRow<'a>> {
    let row = |function: &'a Function| FunctionRow {
        function,
        role: inventory.role(function),
        name: naming.names.device(function.vendor, function.device),
    };
    inventory.functions.values().map(row).collect()
}

fn group_row<'a>(inventory: &Inventory, users: &Users, group: &'a Group) -> GroupRow<'a> {
    let unit = inventory.unit_of_group(group.id);
    let own = |address: &Address| group.members.contains(address);
    let blockers = unit.into_iter().flat_map(|unit| &unit.blockers).filter(|blocker| own(&blocker.address));
    let mut reasons: Vec<Reason> = blockers
        .map(|b| {
            Reason::new(Code::HostDriver, format!("{} is on {}, which owns its DMA", b.address, b.driver))
        })
        .collect();
    let unreadable = unit.into_iter().flat_map(|unit| &unit.unreadable).filter(|(address, _)| own(address));
    reasons
        .extend(unreadable.map(|(address, why)| Reason::new(Code::Unreadable, format!("{address}: {why}"))));
    if group.noiommu {
        reasons.push(Reason::new(Code::NoIommuGroup, "there is no IOMMU behind this group"));
    }
    reasons.extend(
        group
            .direct_mappings()
            .map(|region| Reason::from(&Refusal::ReservedRegion { group: group.id, region: region.clone() })),
    );
    let users = unit.map(|unit| users.of_unit(inventory, unit)).unwrap_or_default().into_iter().collect();
    GroupRow { group, viable: reasons.is_empty(), reasons, users }
}

fn tables(
    inspection: &Inspection<'_>,
    inventory: &Inventory,
    workload_type: impl std::fmt::Display,
) -> String {
    // People look for GPUs and what sits in their groups; JSON has the rest of the machine too.
    let passing = inventory.units().iter().filter(|unit| !unit.offerable.is_empty());
    let passthrough: BTreeSet<u32> = passing.flat_map(|unit| &unit.groups).copied().collect();
    let concerns = |row: &&FunctionRow<'_>| {
        matches!(row.role, Role::Gpu | Role::NvSwitch | Role::Companion | Role::Vf)
            || row.function.iommu_group.is_some_and(|group| passthrough.contains(&group))
    };
    let functions = inspection.functions.iter().filter(concerns).map(|row| {
        let f = row.function;
        vec![
            f.address.to_string(),
            format!("{:04x}:{:04x}", f.vendor, f.device),
            f.class.to_string(),
            row.role.to_string(),
            or_dash(f.driver.as_ref()),
            or_dash(f.driver_override.as_ref()),
            or_dash(f.iommu_group),
            f.numa_node.to_string(),
            row.name.unwrap_or("-").to_owned(),
        ]
    });
    let header = ["address", "id", "class", "role", "driver", "override", "group", "numa", "name"];
    let mut text = render(&header, functions.collect(), &no_gpu(inventory));

    for (address, reason) in inspection.unreadable {
        let _ = writeln!(text, "\n{address} cannot be read: {reason}");
    }
    text.push('\n');
    if !inspection.iommu {
        text.push_str(
            "No IOMMU group on this node: the IOMMU is off or missing, so nothing can go to a VM.\n\n",
        );
    }
    let mut notes = String::new();
    let groups = inspection.groups.iter().filter(|row| passthrough.contains(&row.group.id)).map(|row| {
        for reason in &row.reasons {
            let _ = writeln!(notes, "  group {}: {reason}", row.group.id);
        }
        for user in &row.users {
            let _ = writeln!(notes, "  group {}: {user}", row.group.id);
        }
        let members: Vec<_> = row.group.members.iter().map(ToString::to_string).collect();
        vec![
            row.group.id.to_string(),
            if row.viable { "yes" } else { "no" }.to_owned(),
            if row.users.is_empty() { "no" } else { "yes" }.to_owned(),
            or_dash(row.group.node.as_ref()),
            members.join(" "),
        ]
    });
    text.push_str(&render(&["group", "viable", "in use", "node", "members"], groups.collect(), ""));
    text.push_str(&notes);

    let _ = writeln!(text, "\nOffers for {workload_type}:");
    text.push_str(&offer_table(&inspection.offers));
    text
}

/// The offers as a table, with each unhealthy one's reasons below it.
pub fn offer_table(offers: &[Offer]) -> String {
    let rows = offers.iter().map(|offer| {
        let reasons: Vec<_> = offer.reasons.iter().map(|reason| reason.code.as_str()).collect();
        vec![
            offer.resource.clone(),
            offer.id.to_string(),
            if offer.healthy { "yes" } else { "no" }.to_owned(),
            if offer.given_out { "yes" } else { "no" }.to_owned(),
            offer.numa_node.to_string(),
            or_dash((!reasons.is_empty()).then(|| reasons.join(","))),
        ]
    });
    render(&["resource", "id", "healthy", "given out", "numa", "why not"], rows.collect(), "Nothing.")
}
