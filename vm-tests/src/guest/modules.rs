//! Loads kernel modules, as `insmod` does; and makes the guest a host that has them, but has not loaded them.
#![allow(clippy::disallowed_methods, reason = "lays the guest's own /lib/modules")]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;
use nix::kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module};

use super::failure::{Step, ensure, io_on};
use super::paths;
use crate::node::Node;

/// Loads every module of the initramfs in the order that the host wrote down; `fakepci` with the node's functions.
///
/// The host's drivers come last, so that the functions are bound by the kernel's own matching.
pub fn load_all(node: &Node) -> Step {
    let order = format!("{}/order", paths::MODULES);
    let names = fs::read_to_string(&order).map_err(io_on("read", order))?;
    for name in names.lines() {
        let parameter = if name == "fakepci.ko" { node.module_parameter() } else { String::new() };
        load(&format!("{}/{name}", paths::MODULES), &parameter)?;
    }
    Ok(())
}

fn load(path: &str, parameter: &str) -> Step {
    let file = File::open(path).map_err(io_on("open", path))?;
    let parameter = CString::new(parameter).unwrap_or_default();
    finit_module(&file, &parameter, ModuleInitFlags::empty()).map_err(|e| io_on("load", path)(e.into()))
}

/// The guest's `/lib/modules/RELEASE`, laid as a distribution lays it: the stock modules, with what `depmod` writes.
#[derive(Debug)]
pub struct ModuleDirectory {
    dir: PathBuf,
    /// In the order that they are loaded in, as `/lib/modules` names them.
    files: Vec<String>,
}

impl ModuleDirectory {
    /// Unloads the stock modules and lays the directory. The last of them, vfio-pci, is packed.
    pub fn lay() -> Step<Self> {
        let order =
            fs::read_to_string(format!("{}/order", paths::MODULES)).map_err(io_on("read", "order"))?;
        let stock: Vec<&str> =
            order.lines().filter(|name| !matches!(*name, "fakepci.ko" | "hostdrv.ko")).collect();
        let release = "/proc/sys/kernel/osrelease";
        let release = fs::read_to_string(release).map_err(io_on("read", release))?;
        let dir = PathBuf::from("/lib/modules").join(release.trim());
        let mut directory = Self { dir, files: Vec::new() };
        for name in &stock {
            let module = format!("{}/{name}", paths::MODULES);
            let content = fs::read(&module).map_err(io_on("read", module))?;
            if *name == "vfio-pci.ko" {
                let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
                let packed = packed.write_all(&content).and_then(|()| packed.finish());
                directory.add("kernel/vfio-pci.ko.gz", &packed.map_err(io_on("pack", "vfio-pci.ko"))?)?;
            } else {
                directory.add(&format!("kernel/{name}"), &content)?;
            }
        }
        directory.put("modules.alias", b"alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n")?;
        directory.put("modules.builtin", b"")?;
        directory.unload()?;
        Ok(directory)
    }

    fn add(&mut self, file: &str, content: &[u8]) -> Step {
        self.put(file, content)?;
        // Each after all before it: more than it needs does no harm.
        let needs: String = self.files.iter().rev().map(|file| format!(" {file}")).collect();
        let known = fs::read_to_string(self.dir.join("modules.dep")).unwrap_or_default();
        self.put("modules.dep", format!("{known}{file}:{needs}\n").as_bytes())?;
        self.files.push(file.to_owned());
        Ok(())
    }

    /// Writes a file of the directory.
    pub fn put(&self, file: &str, content: &[u8]) -> Step {
        let path = self.dir.join(file);
        let parent = path.parent().unwrap_or(&path);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, content))
            .map_err(io_on("write", path.to_string_lossy()))
    }

    /// Unloads what of the directory's modules is loaded.
    pub fn unload(&self) -> Step {
        for file in self.files.iter().rev() {
            let name = file.rsplit('/').next().and_then(|name| name.split('.').next()).unwrap_or_default();
            let name = name.replace('-', "_");
            if is_loaded(&name) {
                let module = CString::new(name.as_str()).unwrap_or_default();
                delete_module(&module, DeleteModuleFlags::O_NONBLOCK)
                    .map_err(|e| io_on("unload", name.as_str())(e.into()))?;
            }
            ensure(&name, !is_loaded(&name), "to be unloaded", &"it is there")?;
        }
        Ok(())
    }
}

/// Whether a module is loaded.
#[must_use]
pub fn is_loaded(name: &str) -> bool {
    PathBuf::from("/sys/module").join(name).join("initstate").exists()
}
