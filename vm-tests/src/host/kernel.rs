//! Bookworm's kernel: downloaded and unpacked, never installed, with the headers of exactly the same build.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::apt::{self, AptError, Package};
use super::cache::{Cache, CacheError, Key};
use super::files::{self, FileError};
use super::process::{self, ProcessError};
use super::progress::say;

const IMAGE: &str = "linux-image-";
const SERIES: &str = "6.1";

/// No usable kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The packages could not be fetched.
    #[error("fetching the kernel")]
    Apt(#[from] AptError),
    /// The cache failed.
    #[error("keeping the kernel")]
    Cache(#[from] CacheError),
    /// A file operation failed.
    #[error("unpacking the kernel")]
    File(#[from] FileError),
    /// A program failed.
    #[error("unpacking the kernel")]
    Process(#[from] ProcessError),
    /// apt offers another series.
    #[error("apt offers {package}, and the lab's kernel is bookworm's {SERIES}. Run it on Debian 12")]
    Series {
        /// What `linux-image-amd64` depends on.
        package: String,
    },
    /// The image is not what the boot protocol says.
    #[error("{path} is no bzImage with an xz payload ({what}), so no vmlinux can be taken out of it", path = path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// What was seen.
        what: &'static str,
    },
}

/// An unpacked kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Its release, as `uname -r` gives it.
    pub release: String,
    /// The ELF image, which boots by PVH: half the time of a bzImage, which unpacks itself under emulation.
    pub vmlinux: PathBuf,
    /// The folder of its modules, with `kernel/` and `modules.order`.
    pub modules: PathBuf,
    /// The folder to build modules against.
    pub headers: PathBuf,
    /// Names the build, for what is made from it.
    pub key: Key,
}

impl Kernel {
    /// Bookworm's present kernel, from the cache or from apt.
    pub fn fetch(cache: &Cache) -> Result<Self, KernelError> {
        let image = apt::dependency("linux-image-amd64", IMAGE)?;
        let release = image.strip_prefix(IMAGE).unwrap_or_default().to_owned();
        if !release.starts_with(&format!("{SERIES}.")) {
            return Err(KernelError::Series { package: image });
        }
        let headers = format!("linux-headers-{release}");
        // Names change with each point release, and the security suite may have a newer kbuild than the main one:
        // the image's version names them all.
        let Package { version, .. } = apt::candidate(&image)?;
        let common = format!("linux-headers-{}-common", release.trim_end_matches("-amd64"));
        let names = [image, headers.clone(), common.clone(), format!("linux-kbuild-{SERIES}")];
        let packages = names.map(|name| Package { name, version: version.clone() });
        let key = Key::of(packages.iter().flat_map(|p| [p.name.as_bytes(), p.version.as_bytes()]));

        let entry = cache.entry::<KernelError>("kernel", &key, |dir| {
            say(&format!("fetching kernel {release} ({version})"));
            apt::need("xz", "xz-utils")?;
            let downloads = tempfile::tempdir_in(dir)
                .map_err(|source| FileError::new("create a folder in", dir, source))?;
            for deb in apt::download(&packages, downloads.path())? {
                apt::unpack(&deb, dir)?;
            }
            extract_vmlinux(&dir.join(format!("boot/vmlinuz-{release}")), &dir.join("vmlinux"))?;
            // Its only line includes the common Makefile by the path of an installed package.
            let makefile = format!("include ../{common}/Makefile\n");
            Ok(files::write(&dir.join("usr/src").join(&headers).join("Makefile"), makefile)?)
        })?;
        Ok(Self {
            vmlinux: entry.join("vmlinux"),
            modules: entry.join("lib/modules").join(&release),
            headers: entry.join("usr/src").join(&headers),
            release,
            key,
        })
    }
}

/// Takes the compressed ELF image out of a bzImage, at the place that the boot protocol's header gives.
fn extract_vmlinux(image: &Path, to: &Path) -> Result<(), KernelError> {
    let bytes = files::read(image)?;
    let payload = payload(&bytes).map_err(|what| KernelError::Image { path: image.to_owned(), what })?;
    let compressed = to.with_extension("xz");
    files::write(&compressed, payload)?;
    let mut command = Command::new("xz");
    command.args(["--decompress", "--keep"]).arg(&compressed).stderr(Stdio::piped());
    process::run(&mut command, "The download may be damaged: delete the lab's cache and run again")?;
    Ok(())
}

/// The xz stream in a bzImage (Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length).
fn payload(image: &[u8]) -> Result<&[u8], &'static str> {
    const SECTOR: usize = 512;
    const XZ: &[u8] = b"\xfd7zXZ\0";
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err("no boot header");
    }
    let setup_sectors = usize::from(*image.get(0x1f1).ok_or("short")?);
    let start = (setup_sectors + 1) * SECTOR + field(image, 0x248)?;
    let length = field(image, 0x24c)?;
    let payload = image.get(start..start + length).ok_or("the payload reaches past the end")?;
    if !payload.starts_with(XZ) {
        return Err("another compression");
    }
    // The last four bytes are the unpacked size, not part of the stream.
    Ok(payload.get(..length - 4).unwrap_or_default())
}

fn field(image: &[u8], at: usize) -> Result<usize, &'static str> {
    let bytes = image.get(at..at + 4).and_then(|b| b.try_into().ok()).ok_or("short")?;
    Ok(u32::from_le_bytes(bytes) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_where_the_header_says() {
        let mut image = vec![0; 0x800];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&14u32.to_le_bytes());
        assert_eq!(payload(&image), Err("another compression"));
        image[1024 + 16..1024 + 26].copy_from_slice(b"\xfd7zXZ\0data");
        assert_eq!(payload(&image), Ok(b"\xfd7zXZ\0data".as_slice()));
        assert_eq!(payload(b"ELF"), Err("no boot header"));
    }
}
