//! The steps of a plan. What carries them out, journals them, undoes them and shows them knows no kind by name.
//!
//! ```text
//!                 ┌───────────── look at the step's subject ◀──────────┐
//!                 ▼                                                    │
//!   [Step::next] ─┬─ Write ─▶ nobody may use the unit ([needs_idle]) ─▶ the write is made
//!                 ├─ Done ──▶ read back: the next step
//!                 └─ Stuck ─▶ the steps before are undone, last first ([Step::inverse])
//! ```
//! A step derives each write from what it sees at that moment, so one that was cut off anywhere goes on from there.
//! Further kinds (`SetVfs`, `CreateMdev`, `RemoveMdev`, `SetVgpuType`, `SetCcMode`) are further variants here, with a
//! [`Subject`] to look at and a [`Write`] to make.
//!
//! [needs_idle]: Step::needs_idle

use std::fmt;

use serde::Serialize;
use vfio::{
    driver::{self, Binding, Next, Target, Wanted, is_vfio},
    modules::{Load, ModuleName},
    pci::{Address, Function, Identity},
    write::Write,
};

use crate::prior::{Prior, Remembered};

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// A kernel module is loaded, unless it is there by then.
    LoadModule(Load),
    /// A function goes from one driver to another.
    Bind(Bind),
}

/// One function's move, and its inverse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bind {
    /// The function.
    pub address: Address,
    /// Which device it is.
    #[serde(skip)]
    pub device: Identity,
    /// As it is now.
    pub from: Binding,
    /// As it shall be.
    pub to: Target,
    /// The way back, should a later step of the unit fail.
    pub inverse: Target,
}

/// What a step looks at before each of its writes, and reads back after the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A function; and the driver whose spelling matters, since it may have been loaded after the plan was made.
    Function {
        /// The function.
        address: Address,
        /// The driver.
        driver: Option<String>,
    },
    /// A kernel module.
    Module(ModuleName),
}

/// What such a look shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The function.
    Function {
        /// As it is.
        function: Box<Function>,
        /// How the driver's directory is spelt now.
        driver: Option<String>,
    },
    /// Whether the module is there.
    Module(bool),
}

/// Which way a step leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Away from what the host had: what was before has to be remembered until it is back.
    Out,
    /// Back to what the host had: what was remembered is done with.
    Back,
    /// Neither: nothing is remembered of it.
    Neither,
}

/// A step that did not end where it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReached {
    /// What was wanted.
    pub wanted: String,
    /// What reading back showed.
    pub seen: String,
}

impl Bind {
    /// The move of `function` to `to`.
    #[must_use]
    pub fn new(function: &Function, to: Target) -> Self {
        let from = Binding::from(function);
        let inverse = Target::restore(&from);
        Self { address: function.address, device: function.identity(), from, to, inverse }
    }

    /// The target, with its vfio driver spelt as its directory is: `driver_override` has to be exact.
    fn target(&self, spelt: Option<&String>) -> Target {
        match (&self.to.driver, spelt) {
            (Wanted::Named(name), Some(spelt)) if is_vfio(name) => {
                let its_own = self.to.driver_override.as_ref() == Some(name);
                let driver_override =
                    if its_own { Some(spelt.clone()) } else { self.to.driver_override.clone() };
                Target { driver: Wanted::Named(spelt.clone()), driver_override }
            }
            _ => self.to.clone(),
        }
    }

    fn leads_to_vfio(&self) -> bool {
        matches!(&self.to.driver, Wanted::Named(name) if is_vfio(name))
    }
}

impl Step {
    /// What is looked at.
    #[must_use]
    pub fn subject(&self) -> Subject {
        match self {
            Self::LoadModule(load) => Subject::Module(load.module.clone()),
            Self::Bind(bind) => {
                let driver = match &bind.to.driver {
                    Wanted::Named(name) => Some(name.clone()),
                    Wanted::AnyHost | Wanted::NoProbe => None,
                };
                Subject::Function { address: bind.address, driver }
            }
        }
    }

    /// The write that comes next, from what is seen now. `made` are the writes of this step so far.
    #[must_use]
    pub fn next(&self, seen: &Seen, made: &[Write]) -> Next {
        match (self, seen) {
            (Self::LoadModule(_), Seen::Module(true)) => Next::Done,
            (Self::LoadModule(_), Seen::Module(false)) if !made.is_empty() => Next::Stuck,
            (Self::LoadModule(load), Seen::Module(false)) => {
                Next::Write(Write::LoadModule(Box::new(load.clone())))
            }
            (Self::Bind(bind), Seen::Function { function, driver }) => {
                let probed = made.iter().any(|write| matches!(write, Write::Probe { .. }));
                driver::next(function, &bind.target(driver.as_ref()), probed)
            }
            // A look shows what was asked for; anything else is no ground for a write.
            (Self::LoadModule(_), Seen::Function { .. }) | (Self::Bind(_), Seen::Module(_)) => Next::Stuck,
        }
    }

    /// The most writes that the step can need.
    #[must_use]
    pub fn most_writes(&self) -> usize {
        match self {
            Self::LoadModule(_) => 1,
            // Override, unbind, probe, override.
            Self::Bind(_) => 4,
        }
    }

    /// The step that undoes this one; none where what it does may stay.
    #[must_use]
    pub fn inverse(&self) -> Option<Self> {
        match self {
            // Other units may use the module by then.
            Self::LoadModule(_) => None,
            Self::Bind(bind) => {
                Some(Self::Bind(Bind { to: bind.inverse.clone(), inverse: bind.to.clone(), ..bind.clone() }))
            }
        }
    }

    /// The function that it changes.
    #[must_use]
    pub fn touches(&self) -> Option<Address> {
        match self {
            Self::LoadModule(_) => None,
            Self::Bind(bind) => Some(bind.address),
        }
    }

    /// Whether several units may need it: then it is made by one of them at a time, and found done by the others.
    #[must_use]
    pub fn shared(&self) -> bool {
        matches!(self, Self::LoadModule(_))
    }

    /// Whether the plan goes on where the kernel refuses it.
    #[must_use]
    pub fn optional(&self) -> bool {
        match self {
            Self::LoadModule(load) => !load.required,
            Self::Bind(_) => false,
        }
    }

    /// Whether nobody may use the unit when `write` is made: it takes something away.
    #[must_use]
    pub fn needs_idle(&self, write: &Write) -> bool {
        match self {
            Self::LoadModule(_) => false,
            Self::Bind(_) => matches!(write, Write::Unbind { .. }),
        }
    }

    /// What has to be remembered before the first write.
    #[must_use]
    pub fn remembers(&self) -> Option<(Address, Remembered)> {
        match self {
            Self::LoadModule(_) => None,
            Self::Bind(bind) => {
                let remembered = Remembered { device: Some(bind.device), was: Prior::from(&bind.from) };
                Some((bind.address, remembered))
            }
        }
    }

    /// Which way it leads.
    #[must_use]
    pub fn way(&self) -> Way {
        match self {
            Self::LoadModule(_) => Way::Neither,
            Self::Bind(bind) if bind.leads_to_vfio() => Way::Out,
            Self::Bind(_) => Way::Back,
        }
    }

    /// What it wanted, and what `seen` shows instead.
    #[must_use]
    pub fn not_reached(&self, seen: &Seen) -> NotReached {
        let wanted = match self {
            Self::LoadModule(load) => format!("module {} loaded", load.module),
            Self::Bind(bind) => match &bind.to.driver {
                Wanted::Named(name) => format!("on {name}"),
                Wanted::AnyHost => "on a host driver".to_owned(),
                Wanted::NoProbe => "off vfio".to_owned(),
            },
        };
        let seen = match seen {
            Seen::Function { function, .. } => match &function.driver {
                Some(driver) => format!("on {driver}"),
                None => "on no driver".to_owned(),
            },
            Seen::Module(there) => if *there { "there" } else { "not there" }.to_owned(),
        };
        NotReached { wanted, seen }
    }

    /// The module to load, for the JSON of earlier versions (`loads`).
    fn as_load(&self) -> Option<&Load> {
        match self {
            Self::LoadModule(load) => Some(load),
            Self::Bind(_) => None,
        }
    }

    /// The move, for the JSON of earlier versions (`moves`).
    fn as_move(&self) -> Option<&Bind> {
        match self {
            Self::LoadModule(_) => None,
            Self::Bind(bind) => Some(bind),
        }
    }
}

/// Steps as JSON shows them: by kind in the fields that have always been there.
#[derive(Serialize)]
pub(crate) struct ByKind<'a> {
    loads: Vec<&'a Load>,
    moves: Vec<&'a Bind>,
}

impl<'a> ByKind<'a> {
    pub(crate) fn of(steps: &'a [Step]) -> Self {
        Self {
            loads: steps.iter().filter_map(Step::as_load).collect(),
            moves: steps.iter().filter_map(Step::as_move).collect(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadModule(load) => {
                let options =
                    if load.options.is_empty() { String::new() } else { format!(" ({})", load.options) };
                write!(f, "load module {}{options}, unless it is there by then", load.module)
            }
            Self::Bind(bind) => {
                let from = bind.from.driver.as_deref().unwrap_or("no driver");
                write!(f, "{}  {from} -> {}", bind.address, bind.to)
            }
        }
    }
}
