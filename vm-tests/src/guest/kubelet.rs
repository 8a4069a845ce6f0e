//! vfiod's own stand-in kubelet, for steps that do not wait for anything else meanwhile.

use tokio::runtime::{Builder, Runtime};
use vfiod::kubelet::KubeletDir;
use vfiod::standin::{Allocated, PodName, StandinKubelet, StandinState, Want};

use super::daemon::PATIENCE;
use super::failure::{Failure, Step, io_on};
use crate::host::lab::chain;

/// A running stand-in kubelet in the usual place.
#[derive(Debug)]
pub struct Kubelet {
    runtime: Runtime,
    standin: StandinKubelet,
}

impl Kubelet {
    /// Starts it.
    pub fn start() -> Step<Self> {
        // A thread of its own: it must answer the agent while the scenario does something else.
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(io_on("start a thread for", "the stand-in kubelet"))?;
        let started = runtime.block_on(StandinKubelet::start(KubeletDir::default()));
        let standin = started.map_err(|error| kubelet_failure("its start", "it to serve", &error))?;
        Ok(Self { runtime, standin })
    }

    /// Waits until what it knows of the plugins is as `wanted` says.
    pub fn wait_for(&self, what: &str, wanted: impl FnMut(&StandinState) -> bool) -> Step<StandinState> {
        let reached = self.runtime.block_on(self.standin.wait_for(wanted, PATIENCE));
        reached.map_err(|error| kubelet_failure("what it sees", what, &error))
    }

    /// Lets a pod's container have any one device.
    pub fn allocate_one(&self, pod: &PodName, resource: &str) -> Step<Allocated> {
        let call = self.standin.allocate(pod, "compute", resource, Want::Count(1));
        let answer = self.runtime.block_on(call);
        answer.map_err(|error| kubelet_failure("Allocate", "an answer", &error))
    }

    /// The pod has ended.
    pub fn pod_gone(&self, pod: &PodName) {
        self.standin.pod_gone(pod);
    }
}

fn kubelet_failure(what: &str, expected: &str, error: &dyn std::error::Error) -> Failure {
    Failure::Expected {
        what: format!("the stand-in kubelet: {what}"),
        expected: expected.to_owned(),
        seen: chain(error),
    }
}
