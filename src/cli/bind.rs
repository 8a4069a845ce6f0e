//! `vfiod bind` and `vfiod unbind`: whole groups, by hand, with the agent's own checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
    time::Duration,
};

use clap::Args;
use serde::Serialize;
use tokio::time::{Instant, sleep};
use vfio::pci::Address;

use super::{
    End, Failure, NodeArgs, Output, OutputArgs, emit, emit_json,
    places::{Places, writer_command},
    plan::group_text,
    runtime,
};
use crate::{
    conduct::{Conduct, Event, Keeper},
    config::Config,
    desired::{Consumer, Desired, WorkloadType},
    execute::Outcome,
    inventory::Inventory,
    lock::{LockError, WriterLock},
    plan::{GroupPlan, Plan, Refusal, Verdict, plan},
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
    plan: GroupPlan,
    /// `unchanged`, `done`, `refused` or `failed`.
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Results {
    groups: Vec<GroupResult>,
}

pub fn run(args: &BindArgs, workload_type: WorkloadType) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let _lock = WriterLock::take(&places.host, &places.state_dir, "bind").map_err(|error| -> Failure {
        match error {
            LockError::Held { owner } if owner.ends_with("agent") => format!(
                "the agent is alive on this node (process {owner}) and keeps it at its workload type; nothing was \
                 touched. Change what the agent is asked for instead, or stop it first"
            )
            .into(),
            other => other.into(),
        }
    })?;
    let results = runtime()?.block_on(work(args, &places, workload_type))?;
    match args.output.output {
        Output::Json => emit_json(&results)?,
        Output::Table => emit(&text(&results))?,
    }
    let fine = results.groups.iter().all(|group| matches!(group.result, "unchanged" | "done"));
    Ok(if fine { End::Done } else { End::Refused })
}

async fn work(args: &BindArgs, places: &Places, workload_type: WorkloadType) -> Result<Results, Failure> {
    let config = Config::default();
    let mut journal = places.journal()?;
    let mut keeper = Keeper::new(places.store(), &journal);
    let patience = Instant::now() + PATIENCE;
    while journal.pending.values().any(|pending| pending.writer.alive()) && Instant::now() < patience {
        sleep(PATIENCE / 40).await;
    }
    journal.pending.retain(|_, pending| pending.writer.alive());
    let inventory = places.observe()?;
    let mut usage = places.usage(&journal, config.pod_resources_deadline).await;
    // No clock here counts down a hold's grace: only what was shown and is gone again is let go.
    usage.settle(&inventory, 0, u64::MAX);
    journal.holds.clone_from(&usage.holds);
    // Asked for by name, a group that was bound at boot is given back as well.
    let adopt_boot_bound = !args.all;
    let desired = Desired { workload_type, consumer: Consumer::default(), adopt_boot_bound };
    let mut planned = plan(&inventory, &desired, &usage, &journal.priors);
    if !args.all {
        let chosen = chosen(&inventory, &args.targets)?;
        planned.groups.retain(|plan| match plan.group {
            Some(group) => chosen.0.contains(&group),
            None => plan.functions.iter().any(|address| chosen.1.contains(address)),
        });
    }
    for plan in &mut planned.groups {
        if let Some(pending) = plan.group.and_then(|group| journal.pending.get(&group)) {
            let wedged = Refusal::Wedged { pid: pending.writer.pid, write: pending.write.to_string() };
            plan.verdict = Verdict::Refused { refusals: vec![wedged] };
            plan.settled.clear();
        }
    }
    for address in planned.groups.iter().flat_map(|plan| &plan.settled) {
        journal.priors.remove(address);
    }
    let mut outcomes = BTreeMap::new();
    let mut conduct = Conduct::start(&places.host, &writer_command(config.write_deadline), &planned);
    loop {
        match conduct.next().await {
            Event::Announce(announce) => announce.record(&mut journal, &mut keeper).await,
            Event::Finished { group, moves, outcome } => {
                journal.conclude(group, &moves, &outcome);
                outcomes.insert(group, outcome);
            }
            Event::AllDone => break,
        }
    }
    keeper.keep(&journal).await?;
    Ok(Results { groups: results(planned, &outcomes) })
}

fn results(planned: Plan, outcomes: &BTreeMap<u32, Outcome>) -> Vec<GroupResult> {
    let result = |plan: GroupPlan| {
        let (result, error) = match (&plan.verdict, plan.group.and_then(|group| outcomes.get(&group))) {
            (Verdict::Right, _) => ("unchanged", None),
            (Verdict::Refused { .. }, _) => ("refused", None),
            (Verdict::Move { .. }, Some(Outcome::Done)) => ("done", None),
            (Verdict::Move { .. }, Some(outcome)) => ("failed", Some(outcome.to_string())),
            (Verdict::Move { .. }, None) => ("failed", Some("its transaction broke off".to_owned())),
        };
        GroupResult { plan, result, error }
    };
    planned.groups.into_iter().map(result).collect()
}

/// The groups asked for, and the functions that are in no group.
fn chosen(inventory: &Inventory, targets: &[Target]) -> Result<(BTreeSet<u32>, BTreeSet<Address>), Failure> {
    let (mut groups, mut alone) = (BTreeSet::new(), BTreeSet::new());
    let passthrough = inventory.passthrough_groups();
    for target in targets {
        let group = match target {
            Target::Group(group) if inventory.groups.contains_key(group) => *group,
            Target::Group(_) => {
                return Err(format!("{target} is not on this node: vfiod inspect lists them").into());
            }
            Target::Function(address) => {
                let Some(function) = inventory.functions.get(address) else {
                    return Err(match inventory.unreadable.get(address) {
                        Some(reason) => reason.clone().into(),
                        None => {
                            format!("{target} is not on this node: vfiod inspect lists its functions").into()
                        }
                    });
                };
                match function.iommu_group {
                    Some(group) => group,
                    None if inventory.offerable().any(|(offered, _)| offered.address == *address) => {
                        alone.insert(*address);
                        continue;
                    }
                    None => {
                        return Err(format!(
                            "{target} is neither a GPU nor an NVSwitch: nothing was touched"
                        )
                        .into());
                    }
                }
            }
        };
        if !passthrough.contains(&group) {
            return Err(format!("{target} holds neither a GPU nor an NVSwitch: nothing was touched").into());
        }
        groups.insert(group);
    }
    Ok((groups, alone))
}

fn text(results: &Results) -> String {
    if results.groups.is_empty() {
        return "No GPU on this node that could be moved (those in an IOMMU group can): nothing to do.\n"
            .to_owned();
    }
    let group = |group: &GroupResult| {
        let name = group
            .plan
            .group
            .map_or_else(|| "function without a group".to_owned(), |id| format!("group {id}"));
        match (&group.error, group.result) {
            (Some(error), _) => format!("{}  FAILED: {error}\n", group_text(&group.plan)),
            (None, "done") => {
                format!("{}  done, and read back: {name} is as asked\n", group_text(&group.plan))
            }
            (None, _) => group_text(&group.plan),
        }
    };
    results.groups.iter().map(group).collect()
}
