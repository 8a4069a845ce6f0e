//! The VFIO calls of a VMM (legacy container and group), as safe functions.
//!
//! Numbers and structures: the kernel's `include/uapi/linux/vfio.h`. All requests are `_IO(';', 100 + n)`, whatever they
//! carry.
#![allow(
    unsafe_code,
    reason = "ioctl and mmap have no safe form; this is the crate's only module that calls them"
)]

use std::ffi::CStr;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use nix::Result;
use nix::libc::{c_char, c_int, c_void};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// The API version that a VMM expects.
pub const API_VERSION: i32 = 0;
/// The IOMMU backend that a VMM asks for.
pub const TYPE1V2: i32 = 3;
/// The region that is a function's configuration space.
pub const CONFIG_REGION: u32 = 7;
/// The "interrupt" by which the kernel asks a VMM to give a function up.
pub const REQUEST_IRQ: u32 = 4;

mod call {
    use super::{DeviceInfo, DmaMap, GroupStatus, IrqSet, RegionInfo, c_char, c_int};
    use nix::{
        ioctl_none_bad, ioctl_readwrite_bad, ioctl_write_int_bad, ioctl_write_ptr_bad, request_code_none,
    };

    ioctl_none_bad!(api_version, request_code_none!(b';', 100));
    ioctl_write_int_bad!(check_extension, request_code_none!(b';', 101));
    ioctl_write_int_bad!(set_iommu, request_code_none!(b';', 102));
    ioctl_readwrite_bad!(group_status, request_code_none!(b';', 103), GroupStatus);
    ioctl_write_ptr_bad!(set_container, request_code_none!(b';', 104), c_int);
    ioctl_write_ptr_bad!(device_fd, request_code_none!(b';', 106), c_char);
    ioctl_readwrite_bad!(device_info, request_code_none!(b';', 107), DeviceInfo);
    ioctl_readwrite_bad!(region_info, request_code_none!(b';', 108), RegionInfo);
    ioctl_write_ptr_bad!(set_irqs, request_code_none!(b';', 110), IrqSet);
    ioctl_write_ptr_bad!(map_dma, request_code_none!(b';', 113), DmaMap);
}

/// `struct vfio_group_status`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// `struct vfio_device_info`, up to the number of interrupts.
#[repr(C)]
#[derive(Debug, Default)]
pub struct DeviceInfo {
    argsz: u32,
    /// `VFIO_DEVICE_FLAGS_*`.
    pub flags: u32,
    /// How many regions it has.
    pub num_regions: u32,
    /// How many interrupt indexes it has.
    pub num_irqs: u32,
}

/// `struct vfio_region_info`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    /// Its size; 0 for a region that is not there.
    pub size: u64,
    /// Where it lies in the device's file.
    pub offset: u64,
}

/// `struct vfio_irq_set` with one eventfd as its data.
#[repr(C)]
#[derive(Debug)]
pub struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    eventfd: c_int,
}

/// `struct vfio_iommu_type1_dma_map`.
#[repr(C)]
#[derive(Debug)]
pub struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

/// A structure's size for its `argsz` field.
fn size<T>() -> u32 {
    // None is larger than 40 bytes.
    u32::try_from(size_of::<T>()).unwrap_or_default()
}

/// VFIO_GET_API_VERSION.
pub fn api_version(container: &File) -> Result<i32> {
    // SAFETY: takes no argument.
    unsafe { call::api_version(container.as_raw_fd()) }
}

/// VFIO_CHECK_EXTENSION.
pub fn has_extension(container: &File, extension: i32) -> Result<bool> {
    // SAFETY: the argument is a plain number.
    unsafe { call::check_extension(container.as_raw_fd(), extension) }.map(|answer| answer > 0)
}

/// VFIO_SET_IOMMU.
pub fn set_iommu(container: &File, backend: i32) -> Result<()> {
    // SAFETY: the argument is a plain number.
    unsafe { call::set_iommu(container.as_raw_fd(), backend) }.map(drop)
}

/// VFIO_GROUP_GET_STATUS: whether the group is viable.
pub fn is_viable(group: &File) -> Result<bool> {
    let mut status = GroupStatus { argsz: size::<GroupStatus>(), ..GroupStatus::default() };
    // SAFETY: the kernel writes at most `argsz` bytes into the structure.
    unsafe { call::group_status(group.as_raw_fd(), &raw mut status) }?;
    Ok(status.flags & 1 != 0)
}

/// VFIO_GROUP_SET_CONTAINER.
pub fn set_container(group: &File, container: &File) -> Result<()> {
    let fd: c_int = container.as_raw_fd();
    // SAFETY: the kernel reads one int.
    unsafe { call::set_container(group.as_raw_fd(), &raw const fd) }.map(drop)
}

/// VFIO_GROUP_GET_DEVICE_FD.
pub fn device(group: &File, address: &CStr) -> Result<File> {
    // SAFETY: the kernel reads a string that ends in NUL.
    let fd = unsafe { call::device_fd(group.as_raw_fd(), address.as_ptr()) }?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// VFIO_DEVICE_GET_INFO.
pub fn device_info(device: &File) -> Result<DeviceInfo> {
    let mut info = DeviceInfo { argsz: size::<DeviceInfo>(), ..DeviceInfo::default() };
    // SAFETY: the kernel writes at most `argsz` bytes into the structure.
    unsafe { call::device_info(device.as_raw_fd(), &raw mut info) }?;
    Ok(info)
}

/// VFIO_DEVICE_GET_REGION_INFO.
pub fn region_info(device: &File, index: u32) -> Result<RegionInfo> {
    let mut info = RegionInfo { argsz: size::<RegionInfo>(), index, ..RegionInfo::default() };
    // SAFETY: the kernel writes at most `argsz` bytes into the structure.
    unsafe { call::region_info(device.as_raw_fd(), &raw mut info) }?;
    Ok(info)
}

/// VFIO_DEVICE_SET_IRQS: the interrupt `index` writes to the eventfd from now on.
pub fn set_irq_eventfd(device: &File, index: u32, eventfd: &impl AsFd) -> Result<()> {
    const DATA_EVENTFD: u32 = 1 << 2;
    const ACTION_TRIGGER: u32 = 1 << 5;
    let set = IrqSet {
        argsz: size::<IrqSet>(),
        flags: DATA_EVENTFD | ACTION_TRIGGER,
        index,
        start: 0,
        count: 1,
        eventfd: eventfd.as_fd().as_raw_fd(),
    };
    // SAFETY: the kernel reads `argsz` bytes and takes its own reference to the eventfd.
    unsafe { call::set_irqs(device.as_raw_fd(), &raw const set) }.map(drop)
}

/// Memory that stands for a VM's.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<c_void>,
    length: NonZeroUsize,
}

impl Memory {
    /// Fresh pages.
    pub fn new(length: NonZeroUsize) -> Result<Self> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) }?;
        Ok(Self { start, length })
    }

    /// VFIO_IOMMU_MAP_DMA: lets devices of the container read and write it at `iova`.
    pub fn map_dma(&self, container: &File, iova: u64) -> Result<()> {
        const READ_WRITE: u32 = 3;
        let map = DmaMap {
            argsz: size::<DmaMap>(),
            flags: READ_WRITE,
            vaddr: self.start.as_ptr() as u64,
            iova,
            size: self.length.get() as u64,
        };
        // SAFETY: the kernel reads `argsz` bytes. It pins the pages, so a device's access stays within them even after
        // they are unmapped here; nothing in this process refers to their content.
        unsafe { call::map_dma(container.as_raw_fd(), &raw const map) }.map(drop)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference into it was ever given out.
        let _ = unsafe { munmap(self.start, self.length.get()) };
    }
}
