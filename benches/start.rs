//! How long an agent takes from its start to the first ListAndWatch answer, and how much memory it has then, on the
//! simulated HGX H100 node. `cargo bench --bench start` prints both; nothing is asserted of them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark stops where it cannot measure")]

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use vfio::sim::{Profile, Simulation};
use vfiod::{kubelet::KubeletDir, standin::StandinKubelet};

const RUNS: usize = 15;
const PATIENCE: Duration = Duration::from_secs(60);
const GPUS: &str = "nvidia.com/GH100_H100_SXM5_80GB";

struct Measured {
    first_list: Duration,
    all_healthy: Duration,
    resident_kib: u64,
}

async fn measure(bound_before: bool) -> Measured {
    let memory = std::path::Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let simulation = Simulation::create(dir.path(), &Profile::hgx_h100()).unwrap();
    let vfiod = env!("CARGO_BIN_EXE_vfiod");
    if bound_before {
        let bound = Command::new(vfiod).args(["bind", "--all", "--root"]).arg(dir.path()).output().unwrap();
        assert!(bound.status.success());
    }
    let mut kubelet =
        StandinKubelet::start(KubeletDir::new(dir.path().join("var/lib/kubelet"))).await.unwrap();
    let start = Instant::now();
    let mut agent = Command::new(vfiod)
        .args(["agent", "--workload-type", "vm-passthrough", "--no-kubernetes", "--root"])
        .arg(dir.path())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let listed =
        |state: &vfiod::standin::StandinState| state.resources.get(GPUS).is_some_and(|r| r.messages > 0);
    kubelet.wait_for(listed, PATIENCE).await.unwrap();
    let first_list = start.elapsed();
    kubelet.wait_for(|state| state.healthy(GPUS) == 8, PATIENCE).await.unwrap();
    let all_healthy = start.elapsed();
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident_kib = line.trim().trim_end_matches(" kB").parse().unwrap();
    agent.kill().unwrap();
    agent.wait().unwrap();
    kubelet.stop().await.unwrap();
    drop(simulation);
    Measured { first_list, all_healthy, resident_kib }
}

fn spread<T: Ord + Copy>(mut values: Vec<T>) -> (T, T, T) {
    values.sort();
    (values[0], values[values.len() / 2], values[values.len() - 1])
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    for (what, bound_before) in [("already bound", true), ("on host drivers", false)] {
        let runs: Vec<_> = (0..RUNS).map(|_| runtime.block_on(measure(bound_before))).collect();
        let millis =
            |pick: fn(&Measured) -> Duration| spread(runs.iter().map(|run| pick(run).as_millis()).collect());
        let (least, middle, most) = millis(|run| run.first_list);
        println!(
            "node {what}: start to first ListAndWatch answer: {middle} ms (median of {RUNS}, {least} to {most})"
        );
        let (least, middle, most) = millis(|run| run.all_healthy);
        println!(
            "node {what}: start to eight healthy GPUs: {middle} ms (median of {RUNS}, {least} to {most})"
        );
        let (least, middle, most) = spread(runs.iter().map(|run| run.resident_kib).collect());
        println!("node {what}: resident memory then: {middle} KiB (median of {RUNS}, {least} to {most})");
    }
}
