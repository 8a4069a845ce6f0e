//! `vfiod bind` and `vfiod unbind`: whole groups, by hand, with the agent's own checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
    time::Duration,
};

use clap::Args;
use decide::{
    consumer::Consumer,
    inventory::Inventory,
    plan::{Plan, UnitPlan, Verdict, plan},
    refusal::Refusal,
    unit::{Unit, UnitId},
    wish::{Desired, WorkloadType},
};
use serde::Serialize;
use tokio::time::{Instant, sleep};
use vfio::pci::Address;

use super::{
    End, Failure, NodeArgs, Output, OutputArgs, emit, emit_json,
    nothing::no_gpu_to_move,
    places::{Places, commands},
    plan::unit_text,
    runtime,
};
use crate::{
    config::Config,
    execute::Outcome,
    lock::{LockError, Owner, Role, WriterLock},
    transaction::{Keeper, Transactions},
};

/// How long the last write of a predecessor that was killed may take to come back.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct BindArgs {
    /// Functions (0000:3b:00.0) or IOMMU groups (by number); a function stands for its whole group
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "FUNCTION|GROUP")]
    targets: Vec<Target>,
    /// Every group that holds a GPU or an NVSwitch
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Function(Address),
    Group(u32),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let group = text.parse().map(Self::Group);
        group.or_else(|_| {
            text.parse().map(Self::Function).map_err(|error: vfio::pci::BadAddress| error.to_string())
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(address) => write!(f, "{address}"),
            Self::Group(group) => write!(f, "group {group}"),
        }
    }
}

/// What became of one group.
#[derive(Debug, Serialize)]
struct GroupResult {
    #[serde(flatten)]
    plan: UnitPlan,
    /// `unchanged`, `done`, `refused` or `failed`.
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Results {
    groups: Vec<GroupResult>,
    /// What is said where there is none.
    #[serde(skip)]
    nothing: String,
}

pub fn run(args: &BindArgs, workload_type: WorkloadType) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let config = places.config()?;
    let _lock =
        WriterLock::take(&places.host, &places.state_dir, Role::Hand).map_err(|error| -> Failure {
            match error {
            LockError::Held { owner: Some(owner @ Owner { role: Some(Role::Agent), .. }) } => format!(
                "the agent is alive on this node ({owner}) and keeps it at its workload type; nothing was \
                 touched. Change what the agent is asked for instead, or stop it first"
            )
            .into(),
            other => other.into(),
        }
        })?;
    let results = runtime()?.block_on(work(args, &places, &config, workload_type))?;
    match args.output.output {
        Output::Json => emit_json(&results)?,
        Output::Table => emit(&text(&results))?,
    }
    let fine = results.groups.iter().all(|group| matches!(group.result, "unchanged" | "done"));
    Ok(if fine { End::Done } else { End::Refused })
}

async fn work(
    args: &BindArgs,
    places: &Places,
    config: &Config,
    workload_type: WorkloadType,
) -> Result<Results, Failure> {
    let mut journal = places.journal()?;
    let mut keeper = Keeper::new(places.store(), &journal);
    let patience = Instant::now() + PATIENCE;
    while journal.pending.iter().any(|pending| pending.writer.alive()) && Instant::now() < patience {
        sleep(PATIENCE / 40).await;
    }
    journal.pending.retain(|pending| pending.writer.alive());
    let inventory = places.observe(config)?;
    let mut usage = places.usage(&journal, config.pod_resources_deadline).await;
    // No clock here counts down a hold's grace: only what was shown and is gone again is let go.
    usage.settle(&inventory, 0, u64::MAX);
    journal.holds.clone_from(&usage.holds);
    // Asked for by name, a group that was bound at boot is given back as well.
    let adopt_boot_bound = !args.all || config.adopt_boot_bound.unwrap_or_default();
    let desired = Desired { workload_type, consumer: Consumer::default(), adopt_boot_bound };
    let mut planned = plan(&inventory, &desired, &usage, &journal.priors);
    for stale in &planned.stale {
        tracing::warn!("{stale}");
    }
    journal.forget_stale(&planned);
    if !args.all {
        let chosen = chosen(&inventory, &args.targets)?;
        planned.units.retain(|plan| chosen.contains(&plan.unit));
    }
    for plan in &mut planned.units {
        if let Some(pending) = journal.waits(&plan.unit) {
            let wedged = Refusal::Wedged { pid: pending.writer.pid, write: pending.write.to_string() };
            plan.verdict = Verdict::Refused { refusals: vec![wedged] };
            plan.settled.clear();
        }
    }
    for address in planned.units.iter().flat_map(|plan| &plan.settled) {
        journal.priors.remove(address);
    }
    let mut outcomes = BTreeMap::new();
    let mut transactions = Transactions::start(&places.host, &commands(config), &planned);
    while let Some(event) = transactions.next().await {
        if let Some(ended) = event.settle(&mut journal, &mut keeper).await {
            outcomes.insert(ended.unit, ended.outcome);
        }
    }
    keeper.keep(&journal).await?;
    Ok(Results { groups: results(planned, &outcomes), nothing: no_gpu_to_move(&inventory) })
}

fn results(planned: Plan, outcomes: &BTreeMap<UnitId, Outcome>) -> Vec<GroupResult> {
    let result = |plan: UnitPlan| {
        let (result, error) = match (&plan.verdict, outcomes.get(&plan.unit)) {
            (Verdict::Right, _) => ("unchanged", None),
            (Verdict::Refused { .. }, _) => ("refused", None),
            (Verdict::Move { .. }, Some(Outcome::Done)) => ("done", None),
            (Verdict::Move { .. }, Some(outcome)) => ("failed", Some(outcome.to_string())),
            (Verdict::Move { .. }, None) => ("failed", Some("its transaction broke off".to_owned())),
        };
        GroupResult { plan, result, error }
    };
    planned.units.into_iter().map(result).collect()
}

/// The units asked for.
fn chosen(inventory: &Inventory, targets: &[Target]) -> Result<BTreeSet<UnitId>, Failure> {
    targets.iter().map(|target| Ok(target.find(inventory)?.id.clone())).collect()
}

impl Target {
    fn find(self, inventory: &Inventory) -> Result<&Unit, Failure> {
        let found = match self {
            Self::Group(group) => inventory.unit_of_group(group),
            Self::Function(address) => {
                if let Some(reason) = inventory.unreadable.get(&address) {
                    return Err(reason.clone().into());
                }
                if inventory.functions.contains_key(&address) && inventory.unit_of(address).is_none() {
                    let text = format!("{self} is neither a GPU nor an NVSwitch: nothing was touched");
                    return Err(text.into());
                }
                inventory.unit_of(address)
            }
        };
        match (found, self) {
            (Some(unit), _) if !unit.offerable.is_empty() => Ok(unit),
            (Some(_), _) => {
                Err(format!("{self} holds neither a GPU nor an NVSwitch: nothing was touched").into())
            }
            (None, Self::Group(_)) => {
                Err(format!("{self} is not on this node: vfiod inspect lists them").into())
            }
            (None, Self::Function(_)) => {
                Err(format!("{self} is not on this node: vfiod inspect lists its functions").into())
            }
        }
    }
}

fn text(results: &Results) -> String {
    if results.groups.is_empty() {
        return results.nothing.clone();
    }
    let group = |group: &GroupResult| {
        let name = group.plan.name();
        match (&group.error, group.result) {
            (Some(error), _) => format!("{}  FAILED: {error}\n", unit_text(&group.plan)),
            (None, "done") => {
                format!("{}  done, and read back: {name} is as asked\n", unit_text(&group.plan))
            }
            (None, _) => unit_text(&group.plan),
        }
    };
    results.groups.iter().map(group).collect()
}
