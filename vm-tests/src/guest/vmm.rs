//! The VMM's stand-in: opens a group and its functions as QEMU does, in a process of its own.
//!
//! ```text
//!  scenario: Vmm::start ──argv──▶ vmm-stand-in: open, set IOMMU, map, get devices, read config
//!            ◀──one JSON line: what it sees──
//!            "asked\n" ──▶ ◀──how often the kernel asked for the functions back──
//!            end of input ──▶ closes all and ends
//! ```

#![allow(clippy::disallowed_methods, reason = "VFIO's nodes must be opened for reading and writing")]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};

use super::failure::{Failure, Step, io_on};
use super::{paths, vfio};

/// A call of the stand-in failed.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// A node could not be opened.
    #[error("opening {node}")]
    Open {
        /// The node.
        node: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A VFIO call failed.
    #[error("{call} on {target}")]
    Call {
        /// The call's name in vfio.h.
        call: &'static str,
        /// The node or function.
        target: String,
        /// The kernel's answer.
        source: Errno,
    },
    /// The kernel answered, but a VMM could not go on.
    #[error("{target}: {what}")]
    Unusable {
        /// The node or function.
        target: String,
        /// Why not.
        what: &'static str,
    },
    /// The configuration space could not be read.
    #[error("reading {address}'s configuration space")]
    Config {
        /// The function.
        address: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The scenario is gone.
    #[error("talking to the scenario")]
    Talk(#[source] std::io::Error),
}

/// What the stand-in sees of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its address.
    pub address: String,
    /// Vendor in configuration space.
    pub vendor: u16,
    /// Device in configuration space.
    pub device: u16,
    /// Class code in configuration space.
    pub class: u32,
}

/// Everything a VMM holds while its VM runs.
struct Held {
    _container: File,
    _group: File,
    _memory: vfio::Memory,
    functions: Vec<(File, EventFd)>,
}

fn open(node: &str) -> Result<File, VmmError> {
    let opened = OpenOptions::new().read(true).write(true).open(node);
    opened.map_err(|source| VmmError::Open { node: node.to_owned(), source })
}

/// For `map_err`: puts call and target to the kernel's answer.
fn on(call: &'static str, target: &str) -> impl FnOnce(Errno) -> VmmError {
    let target = target.to_owned();
    move |source| VmmError::Call { call, target, source }
}

/// Opens the group and its functions as QEMU does.
fn take(container_node: &str, node: &str, addresses: &[String]) -> Result<(Held, Vec<Seen>), VmmError> {
    const GUEST_MEMORY: NonZeroUsize = NonZeroUsize::new(1 << 20).unwrap();
    let unusable = |what| VmmError::Unusable { target: node.to_owned(), what };
    let container = open(container_node)?;
    if vfio::api_version(&container).map_err(on("VFIO_GET_API_VERSION", container_node))? != vfio::API_VERSION
    {
        return Err(unusable("another VFIO API version"));
    }
    if !vfio::has_extension(&container, vfio::TYPE1V2).map_err(on("VFIO_CHECK_EXTENSION", container_node))? {
        return Err(unusable("no TYPE1v2 IOMMU backend"));
    }
    let group = open(node)?;
    if !vfio::is_viable(&group).map_err(on("VFIO_GROUP_GET_STATUS", node))? {
        return Err(unusable("the group is not viable"));
    }
    vfio::set_container(&group, &container).map_err(on("VFIO_GROUP_SET_CONTAINER", node))?;
    vfio::set_iommu(&container, vfio::TYPE1V2).map_err(on("VFIO_SET_IOMMU", node))?;
    let memory = vfio::Memory::new(GUEST_MEMORY).map_err(on("mmap", node))?;
    memory.map_dma(&container, 0).map_err(on("VFIO_IOMMU_MAP_DMA", node))?;
    let taken = addresses.iter().map(|address| take_function(&group, address));
    let (functions, seen) = taken.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    Ok((Held { _container: container, _group: group, _memory: memory, functions }, seen))
}

fn take_function(group: &File, address: &str) -> Result<((File, EventFd), Seen), VmmError> {
    let unusable = |what| VmmError::Unusable { target: address.to_owned(), what };
    let name = CString::new(address).map_err(|_| unusable("no address"))?;
    let device = vfio::device(group, &name).map_err(on("VFIO_GROUP_GET_DEVICE_FD", address))?;
    let info = vfio::device_info(&device).map_err(on("VFIO_DEVICE_GET_INFO", address))?;
    if info.num_regions <= vfio::CONFIG_REGION || info.num_irqs <= vfio::REQUEST_IRQ {
        return Err(unusable("no PCI device to VFIO"));
    }
    let config = vfio::region_info(&device, vfio::CONFIG_REGION)
        .map_err(on("VFIO_DEVICE_GET_REGION_INFO", address))?;
    let mut header = [0; 12];
    let read = device.read_exact_at(&mut header, config.offset);
    read.map_err(|source| VmmError::Config { address: address.to_owned(), source })?;
    let request = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
        .map_err(on("eventfd", address))?;
    vfio::set_irq_eventfd(&device, vfio::REQUEST_IRQ, &request)
        .map_err(on("VFIO_DEVICE_SET_IRQS", address))?;
    let [v0, v1, d0, d1, .., c0, c1, c2] = header;
    let seen = Seen {
        address: address.to_owned(),
        vendor: u16::from_le_bytes([v0, v1]),
        device: u16::from_le_bytes([d0, d1]),
        class: u32::from_le_bytes([c0, c1, c2, 0]),
    };
    Ok(((device, request), seen))
}

impl Held {
    /// How often the kernel asked for a function back since the last look.
    fn asked(&self) -> u64 {
        // An eventfd that was not written to answers EAGAIN.
        self.functions.iter().map(|(_, request)| request.read().unwrap_or(0)).sum()
    }
}

/// The stand-in's whole life. `arguments`: container node, group node, addresses.
pub fn main(arguments: &[String]) -> Result<(), VmmError> {
    let [container, node, addresses @ ..] = arguments else {
        return Err(VmmError::Unusable {
            target: String::new(),
            what: "arguments: CONTAINER GROUP ADDRESS...",
        });
    };
    let (held, seen) = take(container, node, addresses)?;
    let mut out = std::io::stdout().lock();
    let mut say = |line: String| writeln!(out, "{line}").map_err(VmmError::Talk);
    say(serde_json::to_string(&seen).unwrap_or_default())?;
    for line in std::io::stdin().lock().lines() {
        if line.map_err(VmmError::Talk)? == "asked" {
            say(held.asked().to_string())?;
        }
    }
    Ok(())
}

/// A running stand-in, seen from the scenario. Dropping it kills it.
#[derive(Debug)]
pub struct Vmm {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    node: String,
    /// The functions as it sees them.
    pub seen: Vec<Seen>,
}

impl Vmm {
    /// Starts a stand-in on a container and a group and waits until it holds the functions.
    pub fn start(container: &str, node: &str, addresses: &[&str]) -> Step<Self> {
        println!("+ {} {container} {node} {addresses:?}", paths::VMM_NAME);
        let mut child = Command::new(paths::VMM)
            .args(["vmm", container, node])
            .args(addresses)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io_on("start", paths::VMM))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Vmm { node: node.to_owned(), said: "it has no pipes".into() });
        };
        let output = BufReader::new(output);
        let mut vmm = Self { child, input: Some(input), output, node: node.to_owned(), seen: Vec::new() };
        let line = vmm.answer()?;
        vmm.seen = serde_json::from_str(&line).map_err(|source| Failure::Json {
            what: "the stand-in's first line".into(),
            text: line,
            source,
        })?;
        Ok(vmm)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How often the kernel asked for a function back since the last call: what no vfiod may ever cause.
    pub fn asked(&mut self) -> Step<u64> {
        if let Some(input) = &mut self.input {
            input.write_all(b"asked\n").map_err(io_on("write to", paths::VMM_NAME))?;
        }
        let line = self.answer()?;
        line.trim().parse().map_err(|_| Failure::Vmm { node: self.node.clone(), said: line })
    }

    /// Lets it close everything and waits for its end.
    pub fn release(mut self) -> Step {
        drop(self.input.take());
        let status = self.child.wait().map_err(io_on("wait for", paths::VMM_NAME))?;
        if status.success() {
            return Ok(());
        }
        Err(Failure::Vmm { node: self.node.clone(), said: format!("it ended with {status}") })
    }

    /// Its next line; if it has ended instead, what it said last.
    fn answer(&mut self) -> Step<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).map_err(io_on("read from", paths::VMM_NAME))?;
        if read > 0 {
            return Ok(line);
        }
        let mut said = String::new();
        if let Some(errors) = &mut self.child.stderr {
            let _ = std::io::Read::read_to_string(errors, &mut said);
        }
        Err(Failure::Vmm { node: self.node.clone(), said: said.trim_end().to_owned() })
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // Without this a failed scenario would leave a holder behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
