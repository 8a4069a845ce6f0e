//! `vfiod demo`: the main job, played on a simulated node with a stand-in kubelet, each step told in plain words.
//!
//! The agent in it is the real one, and so are the sockets, the journal and the writer processes; simulated are the
//! kernel below the node's tree, the kubelet and the VM. It fails when a step does not come out as it is told.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use decide::{
    consumer::Consumer,
    wish::{Desired, Wish, WorkloadType},
};
use tokio::{sync::watch, time::timeout};
use vfio::{
    pci::{self, Address},
    sim::{Profile, Simulation},
};

use super::{
    End, Failure, NodeArgs, emit,
    inspect::offer_table,
    places::Places,
    runtime,
    table::{or_dash, render},
};
use crate::{
    agent::{Service, Settings, Tuning},
    config::Config,
    device_plugin,
    lock::{Role, WriterLock},
    standin::{PodName, StandinKubelet, Want},
    status::{State, Status},
};

/// How long a step may take before the demo says that it failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// The VM's process on the simulated node.
const VMM_PID: u32 = 4242;

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Play on a node below DIR, a new directory that is left there afterwards
    #[arg(long, value_name = "DIR", conflicts_with = "lay")]
    root: Option<PathBuf>,
    /// Only lay the simulated node below DIR, to try the other subcommands on it with --root DIR
    #[arg(long, value_name = "DIR")]
    lay: Option<PathBuf>,
    /// Which node (with --lay): a built-in profile such as hgx-h200 (one that is not there lists them all), or the path of a
    /// file of your own (docs/profiles.md)
    #[arg(long, value_name = "NAME|FILE.yaml", default_value = "hgx-h100", requires = "lay")]
    profile: String,
}

pub fn run(args: &DemoArgs) -> Result<End, Failure> {
    match &args.lay {
        Some(dir) => lay(dir, &args.profile),
        None => {
            runtime()?.block_on(play(args.root.as_deref()))?;
            Ok(End::Done)
        }
    }
}

fn lay(dir: &Path, name: &str) -> Result<End, Failure> {
    let profile = Profile::find(name)?;
    refuse_taken(dir)?;
    Simulation::create(dir, &profile)?;
    let at = dir.display();
    emit(&format!(
        "A simulated node ({}) lies below {at}. Try:\n  vfiod inspect --root {at}\n  vfiod bind --all --root {at}\n",
        profile.name
    ))?;
    Ok(End::Done)
}

/// A node is laid into a new directory only: never over another, and never over a machine's own.
fn refuse_taken(dir: &Path) -> Result<(), Failure> {
    if dir.join("sys").exists() {
        return Err(format!("{} holds a node already: give a new directory", dir.display()).into());
    }
    Ok(())
}

/// One line of the story.
fn say(text: &str) -> Result<(), Failure> {
    emit(&format!("{text}\n"))
}

/// The stage: node, kubelet, agent.
struct Stage {
    simulation: Simulation,
    kubelet: StandinKubelet,
    service: Service,
}

async fn play(root: Option<&Path>) -> Result<(), Failure> {
    // Held until the end: a directory of the demo's own goes with it.
    let temporary = tempfile::Builder::new().prefix("vfiod-demo-").tempdir()?;
    let root = root.unwrap_or(temporary.path());
    refuse_taken(root)?;
    let simulation = Simulation::create(root, &Profile::hgx_h100())?;
    let places = Places::new(&NodeArgs {
        root: Some(root.to_owned()),
        state_dir: None,
        kubelet_dir: None,
        config: None,
        no_kubernetes: true,
    })?;
    let _lock = WriterLock::take(&places.host, &places.state_dir, Role::Demo)?;
    say("== 1. A node: eight H100 and four NVSwitches, all on the host's drivers")?;
    drivers(&simulation)?;

    let kubelet = StandinKubelet::start(places.kubelet.clone()).await?;
    let service = Service::start(
        settings(&places)?,
        device_plugin::Settings::default(),
        desired(WorkloadType::Container),
        &places.socket,
    )?;
    let mut stage = Stage { simulation, kubelet, service };
    let story = tell(&mut stage).await;
    stage.service.stop().await;
    stage.kubelet.stop().await?;
    story
}

fn settings(places: &Places) -> Result<Settings, Failure> {
    let settings = places.settings(&Config::default())?;
    // A watcher of the demo should not have to wait for what a node's operator gladly waits for.
    let tuning = Tuning { blocked_retry: Duration::from_millis(300), ..settings.tuning };
    Ok(Settings { tuning, ..settings })
}

fn desired(workload_type: WorkloadType) -> Desired {
    Desired { workload_type, consumer: Consumer::Kubevirt, adopt_boot_bound: false }
}

async fn tell(stage: &mut Stage) -> Result<(), Failure> {
    say("\n== 2. An agent starts and is asked for containers: the node is right as it is")?;
    until(&mut stage.service.status, "the agent is ready", |status| status.state == State::Ready).await?;
    say(&format!("Kernel writes so far: {}.", stage.simulation.writes()?.len()))?;

    say(
        "\n== 3. The wish becomes vm-passthrough: every group moves to vfio-pci, side by side, each read back",
    )?;
    stage.service.wish.send_replace(Wish::Clear(desired(WorkloadType::VmPassthrough)));
    let ready = until(&mut stage.service.status, "all groups are bound", |status| {
        status.state == State::Ready && status.workload_type == WorkloadType::VmPassthrough
    })
    .await?;
    say(&format!(
        "Kernel writes so far: {} (override, unbind, probe of 12 functions).",
        stage.simulation.writes()?.len()
    ))?;

    say("\n== 4. The kubelet sees the offers")?;
    let gpus = ready
        .offers
        .iter()
        .find(|offer| offer.resource.contains("H100_SXM5"))
        .map(|offer| offer.resource.clone());
    let resource = gpus.ok_or("no GPU is offered")?;
    let named = resource.clone();
    let seen = stage.kubelet.wait_for(move |state| state.healthy(&named) == 8, PATIENCE).await?;
    for (name, offered) in &seen.resources {
        let healthy = offered.devices.values().filter(|device| device.healthy).count();
        say(&format!("kubelet: {name}: {healthy} of {} healthy", offered.devices.len()))?;
    }

    say("\n== 5. A VM asks for one: Allocate is answered as KubeVirt's launcher needs it")?;
    let pod = PodName::new("tenant-a", "virt-launcher-training-0");
    let given = stage.kubelet.allocate(&pod, "compute", &resource, Want::Count(1)).await?;
    for (name, value) in &given.env {
        say(&format!("env   {name}={value}"))?;
    }
    for (path, _, permissions) in &given.nodes {
        say(&format!("node  {path} ({permissions})"))?;
    }
    let address: Address = given.ids.first().ok_or("nothing was allocated")?.parse()?;
    let group = group_of(stage, address)?;
    stage.simulation.start_vmm(VMM_PID, "qemu-kvm", group)?;
    say(&format!("The VM runs: qemu-kvm (pid {VMM_PID}) has /dev/vfio/{group} and the device open."))?;

    say(
        "\n== 6. The wish becomes container again while the VM runs: what is free goes back, the VM's GPU is left alone",
    )?;
    let before = stage.simulation.writes()?.len();
    stage.service.wish.send_replace(Wish::Clear(desired(WorkloadType::Container)));
    let blocked = until(&mut stage.service.status, "the switch is refused for the VM's group", |status| {
        status.state == State::Blocked && status.groups.iter().filter(|group| !group.right).count() == 1
    })
    .await?;
    for reason in &blocked.reasons {
        say(&format!("refused: {}: {}", reason.code, reason.message))?;
    }
    let touched = stage
        .simulation
        .writes()?
        .iter()
        .skip(before)
        .filter(|write| write.function() == Some(address))
        .count();
    say(&format!("Kernel writes to {address} since the wish changed: {touched}."))?;
    if touched != 0 {
        return Err(format!("{address} was written to while a VM had it").into());
    }
    say("Still listed, so that the kubelet keeps the pod whatever restarts:")?;
    emit(&offer_table(&blocked.offers))?;

    say("\n== 7. The VM ends, and the switch goes through by itself")?;
    stage.simulation.end_process(VMM_PID)?;
    stage.kubelet.pod_gone(&pod);
    until(&mut stage.service.status, "the last group is given back", |status| {
        status.state == State::Ready && status.offers.is_empty()
    })
    .await?;
    drivers(&stage.simulation)?;
    say(&format!(
        "\nThe node is as it was. Kernel writes in all: {}; none of them under a running VM.",
        stage.simulation.writes()?.len()
    ))
}

fn group_of(stage: &Stage, address: Address) -> Result<u32, Failure> {
    let function = pci::read(stage.simulation.host(), address)?;
    Ok(function.and_then(|function| function.iommu_group).ok_or("the function is in no group")?)
}

/// The functions that matter, with their drivers.
fn drivers(simulation: &Simulation) -> Result<(), Failure> {
    let functions = pci::functions(simulation.host())?;
    let rows = functions.known.values().filter(|function| function.vendor == 0x10de).map(|function| {
        vec![
            function.address.to_string(),
            format!("{:04x}:{:04x}", function.vendor, function.device),
            or_dash(function.driver.as_ref()),
            or_dash(function.iommu_group),
        ]
    });
    emit(&render(&["address", "id", "driver", "group"], rows.collect(), ""))
}

async fn until(
    status: &mut watch::Receiver<Status>,
    what: &str,
    reached: impl FnMut(&Status) -> bool,
) -> Result<Status, Failure> {
    match timeout(PATIENCE, status.wait_for(reached)).await {
        Ok(Ok(status)) => Ok(status.clone()),
        Ok(Err(_)) => Err(format!("the agent ended before {what}").into()),
        Err(_) => Err(format!("{} s went by before {what}", PATIENCE.as_secs()).into()),
    }
}
