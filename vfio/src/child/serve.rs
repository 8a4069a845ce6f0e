//! The child's side: prepares one write at a time, and makes it when told.

use std::{
    ffi::CStr,
    fs::{self, File},
    io::{self, BufRead, Write as _},
};

use nix::{
    errno::Errno,
    fcntl::OFlag,
    sys::prctl,
    unistd::{self, Pid},
};
use reason::{Code, Coded};

use super::{
    module,
    protocol::{Answer, Ask},
};
#[cfg(feature = "simulation")]
use crate::sim;
use crate::{
    holders::walk,
    host::{Host, Kernel},
    pci::{self, life},
    write::Write,
};

/// Why the child ended, other than by its pipe's end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The pipe failed.
    #[error("the pipe to the agent failed")]
    Pipe(#[from] io::Error),
    /// Something else than the agent wrote into it.
    #[error("the agent's message is not understood")]
    Message(#[from] serde_json::Error),
}

impl Coded for ServeError {
    fn code(&self) -> Code {
        match self {
            Self::Pipe(_) => Code::PipeFailed,
            Self::Message(_) => Code::InvalidRequest,
        }
    }

    /// The agent starts another child, with another pipe; what one child does not understand, the next will not either.
    fn retryable(&self) -> bool {
        match self {
            Self::Pipe(_) => true,
            Self::Message(_) => false,
        }
    }
}

/// What the children call themselves (`/proc/PID/comm`, at most 15 characters).
const WRITER: &CStr = c"kernel-writer";
const READER: &CStr = c"kernel-reader";

/// Serves writes on `host` until `input` ends.
///
/// The first thing it does is to close every inherited descriptor but the pipe's: a child left behind in a blocked write
/// must not keep anything of the agent's open.
///
/// # Errors
/// When the pipe fails or carries something else. The process ends on it; the agent sees the pipe close.
pub fn serve(host: &Host, input: impl BufRead, output: impl io::Write) -> Result<(), ServeError> {
    let agent = unistd::getppid();
    let mut prepared: Option<(Write, Prepared)> = None;
    answer_all(WRITER, input, output, |ask, say| match ask {
        Ask::Prepare(write) => say(match prepare(host, &write) {
            Ok(ready) => {
                prepared = Some((write, ready));
                Answer::Ready
            }
            Err(answer) => answer,
        }),
        // Without a prepared write there is nothing to do: ENODATA, and nothing is touched.
        Ask::Go => say(match prepared.take() {
            None => Answer::Failed(Errno::ENODATA as i32),
            Some((write, ready)) => {
                carry_out(host, &write, ready, agent).map_or_else(|e| failed(&e), |()| Answer::Done)
            }
        }),
        Ask::Look(_) | Ask::Life(_) | Ask::Holders(_) => read(host, ask, say),
    })
}

/// Serves reads on `host` until `input` ends, and makes no write whatever it is asked.
///
/// # Errors
/// As [`serve`].
pub fn serve_looks(host: &Host, input: impl BufRead, output: impl io::Write) -> Result<(), ServeError> {
    answer_all(READER, input, output, |ask, say| read(host, ask, say))
}

/// Says one answer to the agent.
type Say<'a> = dyn FnMut(Answer) -> Result<(), ServeError> + 'a;

fn read(host: &Host, ask: Ask, say: &mut Say<'_>) -> Result<(), ServeError> {
    match ask {
        Ask::Prepare(_) | Ask::Go => say(Answer::Failed(Errno::EPERM as i32)),
        Ask::Look(address) => say(match pci::read(host, address) {
            Ok(function) => Answer::Function(function.map(Box::new)),
            Err(error) => Answer::Unreadable(reason::chain(&error)),
        }),
        Ask::Life(address) => say(Answer::Life(life::look(host, address, false))),
        Ask::Holders(request) => walk(host, &request, &mut |seen| say(Answer::Seen(seen))),
    }
}

fn answer_all(
    name: &CStr,
    mut input: impl BufRead,
    mut output: impl io::Write,
    mut answer: impl FnMut(Ask, &mut Say<'_>) -> Result<(), ServeError>,
) -> Result<(), ServeError> {
    close_inherited();
    // A name is for people: without one the child does its work all the same.
    let _ = prctl::set_name(name);
    let mut line = String::new();
    let mut say = |answer: Answer| {
        let mut text = serde_json::to_string(&answer)?;
        text.push('\n');
        output.write_all(text.as_bytes())?;
        Ok(output.flush()?)
    };
    loop {
        line.clear();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        answer(serde_json::from_str(&line)?, &mut say)?;
    }
}

/// A write that is ready to be made.
enum Prepared {
    Sysfs(File),
    Module(module::Ready),
    Simulated,
}

fn failed(error: &io::Error) -> Answer {
    Answer::Failed(error.raw_os_error().unwrap_or(Errno::EIO as i32))
}

fn prepare(host: &Host, write: &Write) -> Result<Prepared, Answer> {
    write.check().map_err(|e| Answer::Refused(e.to_string()))?;
    // Before anything is opened: what stands for a kernel's file in a plain tree may be anything.
    if host.kernel() == Kernel::Simulated && !cfg!(feature = "simulation") {
        return Err(Answer::NoSimulation);
    }
    let path = write.path(host);
    // Opening a sysfs file for writing has no effect of its own.
    let access = if matches!(write, Write::LoadModule(_)) { OFlag::O_RDONLY } else { OFlag::O_WRONLY };
    let file = host.open_for(&path, access).map_err(|e| failed(&e))?;
    match (host.kernel(), write) {
        (Kernel::Simulated, _) => Ok(Prepared::Simulated),
        (Kernel::Real, Write::LoadModule(load)) => {
            let ready = module::ready(file, load.file.packing());
            ready.map(Prepared::Module).map_err(|error| match error.raw_os_error() {
                Some(errno) => Answer::Failed(errno),
                None => Answer::Refused(format!("{} cannot be unpacked: {error}", path.display())),
            })
        }
        (Kernel::Real, _) => Ok(Prepared::Sysfs(file)),
    }
}

fn carry_out(host: &Host, write: &Write, prepared: Prepared, agent: Pid) -> io::Result<()> {
    let result = match (prepared, write) {
        (Prepared::Simulated, _) => simulate(host, write, agent),
        (Prepared::Module(ready), Write::LoadModule(load)) => module::load(&ready, &load.options),
        (Prepared::Sysfs(mut file), _) => {
            // One write(2): sysfs takes each as a whole command.
            let bytes = text(write).into_bytes();
            let written = file.write(&bytes)?;
            if written == bytes.len() { Ok(()) } else { Err(io::Error::from(Errno::EIO)) }
        }
        // Each write is prepared as what it is.
        (Prepared::Module(_), _) => Err(io::Error::from(Errno::EINVAL)),
    };
    match (result, write) {
        // Somebody else was faster, and it is there.
        (Err(error), Write::LoadModule(_)) if error.raw_os_error() == Some(Errno::EEXIST as i32) => Ok(()),
        (result, _) => result,
    }
}

#[cfg(feature = "simulation")]
fn simulate(host: &Host, write: &Write, agent: Pid) -> io::Result<()> {
    sim::kernel::answer(host, write, agent).map_err(io::Error::from)
}

/// Nothing is prepared for a kernel that is not there.
#[cfg(not(feature = "simulation"))]
fn simulate(_: &Host, _: &Write, _: Pid) -> io::Result<()> {
    Err(io::Error::from(Errno::ENOSYS))
}

/// What is written to a sysfs file.
fn text(write: &Write) -> String {
    match write {
        // An empty write is no write at all: a newline clears.
        Write::Override { driver, .. } => format!("{}\n", driver.as_deref().unwrap_or_default()),
        Write::Unbind { address, .. } | Write::Probe { address } => address.to_string(),
        Write::LoadModule(_) => String::new(),
    }
}

fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for fd in open {
        // The one that listed the directory is closed already: EBADF is fine.
        let _ = unistd::close(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clearing_an_override_writes_a_newline() {
        let address = "0000:01:00.0".parse().unwrap();
        assert_eq!(text(&Write::Override { address, driver: None }), "\n");
    }
}
