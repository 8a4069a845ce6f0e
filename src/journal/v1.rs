//! Version 1 of the journal, as the first vfiod wrote it: priors by address alone, writes in flight by group number.

use std::collections::{BTreeMap, BTreeSet};

use decide::{
    prior::{Prior, Remembered},
    unit::UnitId,
    usage::Hold,
};
use serde::Deserialize;
use vfio::{pci::Address, process::ProcessId, write::Write};

use super::Pending;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Journal {
    #[expect(dead_code, reason = "it was looked at before")]
    version: u32,
    boot_id: String,
    priors: BTreeMap<Address, Prior>,
    pending: BTreeMap<u32, InFlight>,
    holds: BTreeMap<Address, Hold>,
}

#[derive(Debug, Deserialize)]
struct InFlight {
    #[serde(flatten)]
    write: Write,
    writer: ProcessId,
}

impl From<Journal> for super::Journal {
    fn from(old: Journal) -> Self {
        let remembered = |was| Remembered { device: None, was };
        // The number of a group is not carried over: the kernel may have given it anew. A module's load was about a group
        // that is not known any more, which may be any.
        let pending = old.pending.into_values().map(|InFlight { write, writer }| {
            let unit = UnitId(write.function().into_iter().collect::<BTreeSet<_>>());
            Pending { unit, write, writer }
        });
        Self {
            priors: old.priors.into_iter().map(|(address, was)| (address, remembered(was))).collect(),
            pending: pending.collect(),
            holds: old.holds.into_iter().map(|(address, hold)| (address.into(), hold)).collect(),
            ..Self::new(&old.boot_id)
        }
    }
}
