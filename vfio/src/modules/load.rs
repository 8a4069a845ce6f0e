//! The order in which modules are loaded, so that one of them is there.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Absence, ModuleFile, ModuleName, Modules};

/// One module to load.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Load {
    /// The module.
    pub module: ModuleName,
    /// Its file, below `/lib/modules`.
    pub file: ModuleFile,
    /// Its options, as `modprobe.d` and the command line have them; empty for none.
    pub options: String,
    /// Whether what comes after it needs it. One that is only wished for (`softdep`) may fail.
    pub required: bool,
}

/// Collects loads, each after those it needs.
///
/// modprobe's order (libkmod-module.c, `kmod_module_get_probe_list`): the soft dependencies before, what `modules.dep` says
/// from the last to the first, the module, the soft dependencies after.
pub(super) struct Walk<'a> {
    modules: &'a Modules,
    seen: BTreeSet<ModuleName>,
    loads: Vec<Load>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(modules: &'a Modules) -> Self {
        Self { modules, seen: BTreeSet::new(), loads: Vec::new() }
    }

    pub(super) fn end(self) -> Vec<Load> {
        self.loads
    }

    /// Adds what it takes to have `module`: nothing where it is there.
    pub(super) fn need(&mut self, module: &ModuleName) -> Result<(), Absence> {
        self.visit(module, true)
    }

    /// Adds what it takes to have `module`, or nothing where it cannot be had.
    pub(super) fn wish(&mut self, module: &ModuleName) {
        let (seen, before) = (self.seen.clone(), self.loads.len());
        if self.visit(module, false).is_err() {
            self.loads.truncate(before);
            self.seen = seen;
        }
    }

    fn visit(&mut self, module: &ModuleName, required: bool) -> Result<(), Absence> {
        if !self.seen.insert(module.clone()) {
            // What was only wished for may be needed after all.
            for load in self.loads.iter_mut().filter(|load| load.module == *module) {
                load.required |= required;
            }
            return Ok(());
        }
        if self.modules.present(module) {
            return Ok(());
        }
        let entry = self.modules.tree()?.entry(module)?;
        let conf = self.modules.conf();
        if let Some(install) = conf.install(module) {
            return Err(Absence::InstallCommand {
                module: module.clone(),
                file: install.file.clone(),
                command: install.command.clone(),
            });
        }
        if conf.forbidden(module) {
            return Err(Absence::ForbiddenAtBoot { module: module.clone() });
        }
        let file =
            ModuleFile::new(&entry.file).map_err(|error| Absence::File { reason: error.to_string() })?;
        let host = self.modules.host();
        host.look_at(&host.modules(file.as_str()))
            .map_err(|error| Absence::File { reason: error.to_string() })?;
        let soft = conf.soft(module);
        for wished in soft.into_iter().flat_map(|soft| &soft.before) {
            self.wish(wished);
        }
        for needed in entry.needs.iter().rev() {
            self.visit(needed, required).map_err(|because| Absence::Needs {
                module: module.clone(),
                needed: needed.clone(),
                because: Box::new(because),
            })?;
        }
        self.loads.push(Load { module: module.clone(), file, options: conf.options(module), required });
        for wished in soft.into_iter().flat_map(|soft| &soft.after) {
            self.wish(wished);
        }
        Ok(())
    }
}
