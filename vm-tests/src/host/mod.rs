//! The host's side: gets QEMU and a kernel, builds modules and initramfs, boots, and reads the result.

pub mod apt;
pub mod cache;
pub mod closure;
pub mod cpio;
pub mod files;
pub mod initramfs;
pub mod kernel;
pub mod kmod;
pub mod lab;
pub mod modules;
pub mod process;
pub mod product;
pub mod progress;
pub mod qemu;
pub mod vm;
