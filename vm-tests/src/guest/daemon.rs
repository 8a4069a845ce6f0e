//! `vfiod agent` as a process of its own: started, watched, killed or told to end.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::failure::{Failure, Step, equal, io_on, text};
use super::paths;

/// Far more than anything takes on an idle host; a loaded one is slow under emulation.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks again and again until there is an answer.
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Step<Option<T>>) -> Step<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if start.elapsed() > PATIENCE {
            return Err(Failure::Expected {
                what: what.to_owned(),
                expected: format!("it within {} s", PATIENCE.as_secs()),
                seen: "nothing of the kind".into(),
            });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// A running agent. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts an agent that serves `workload_type`; its log goes to the console.
    pub fn start(workload_type: &str) -> Step<Self> {
        let arguments =
            ["agent", "--workload-type", workload_type, "--consumer", "kubevirt", "--no-kubernetes"];
        println!("+ vfiod {}", arguments.join(" "));
        let child = Command::new(paths::VFIOD)
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .map_err(io_on("start", paths::VFIOD))?;
        Ok(Self { child })
    }

    /// What the agent says of itself; none while it does not answer yet.
    pub fn status(&mut self) -> Step<Option<Value>> {
        let ended = self.child.try_wait().map_err(io_on("wait for", paths::VFIOD))?;
        if let Some(status) = ended {
            return Err(Failure::Expected {
                what: "the agent".into(),
                expected: "to run on".into(),
                seen: format!("it ended with {status}"),
            });
        }
        let output = Command::new(paths::VFIOD)
            .args(["status", "-o", "json"])
            .output()
            .map_err(io_on("run", paths::VFIOD))?;
        if !output.status.success() {
            return Ok(None);
        }
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        let parsed = serde_json::from_str(&answer);
        parsed.map(Some).map_err(|source| Failure::Json {
            what: "standard output of `vfiod status`".into(),
            text: answer,
            source,
        })
    }

    /// Waits until it says that it is in `state`, and gives all it says then.
    pub fn wait_for(&mut self, state: &str) -> Step<Value> {
        let mut last = Value::Null;
        let reached = until(&format!("the agent's state {state}"), || {
            let Some(status) = self.status()? else { return Ok(None) };
            let there = status.get("state").is_some_and(|s| text(s).eq_ignore_ascii_case(state));
            last.clone_from(&status);
            Ok(there.then_some(status))
        });
        reached.inspect_err(|_| println!("the agent said last: {last}"))
    }

    /// Its end without a warning, as by the kernel's out-of-memory killer.
    pub fn kill(mut self) -> Step {
        self.child.kill().map_err(io_on("kill", paths::VFIOD))?;
        self.child.wait().map_err(io_on("wait for", paths::VFIOD))?;
        Ok(())
    }

    /// Tells it to end and checks that it ends well.
    pub fn terminate(mut self) -> Step {
        // A Linux process id fits.
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap_or_default());
        kill(pid, Signal::SIGTERM).map_err(|e| io_on("end", paths::VFIOD)(e.into()))?;
        let code = until("the end of an agent told to end", || {
            self.child.try_wait().map_err(io_on("wait for", paths::VFIOD))
        })?;
        equal("exit status of the agent told to end", &code.code(), &Some(0))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Without this a failed scenario would leave an agent behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
