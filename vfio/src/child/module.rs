//! Loading a module: the child's part of it.

use std::{
    ffi::CString,
    fs::File,
    io::{self, Read},
};

use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module, init_module},
};

use crate::modules::Packing;

/// More than any module unpacks to; the largest drivers have some 100 MB. A damaged file shall not take the node's memory.
const MOST_BYTES: u64 = 512 * 1024 * 1024;

/// A module that stands ready.
pub(super) enum Ready {
    /// The kernel reads the file itself.
    File(File),
    /// It was packed: the kernel gets what was in it. (It could unpack some files itself, where it was built with
    /// `CONFIG_MODULE_DECOMPRESS`; a way that serves every kernel needs no second one beside it.)
    Image(Vec<u8>),
}

/// Opens and, where needed, unpacks a module's file.
pub(super) fn ready(file: File, packing: Packing) -> io::Result<Ready> {
    let unpacked: Box<dyn Read> = match packing {
        Packing::None => return Ok(Ready::File(file)),
        Packing::Xz => Box::new(lzma_rust2::XzReader::new(io::BufReader::new(file), true)),
        Packing::Gzip => Box::new(flate2::read::MultiGzDecoder::new(file)),
        Packing::Zstd => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(io::BufReader::new(file));
            Box::new(decoder.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?)
        }
    };
    let mut image = Vec::new();
    unpacked.take(MOST_BYTES).read_to_end(&mut image)?;
    Ok(Ready::Image(image))
}

/// Hands the module to the kernel.
pub(super) fn load(ready: &Ready, options: &str) -> io::Result<()> {
    let options = CString::new(options).map_err(|_| Errno::EINVAL)?;
    let loaded = match ready {
        Ready::File(file) => finit_module(file, &options, ModuleInitFlags::empty()),
        Ready::Image(image) => init_module(image, &options),
    };
    Ok(loaded?)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn unpacked(packed: &[u8], packing: Packing) -> io::Result<Vec<u8>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(packed).unwrap();
        file.rewind().unwrap();
        match ready(file, packing)? {
            Ready::Image(image) => Ok(image),
            Ready::File(_) => panic!("not unpacked"),
        }
    }

    /// `printf 'module text\n' | xz --check=crc32 --lzma2=dict=1MiB`, as the kernel's build packs modules
    /// (scripts/Makefile.modinst), `| zstd`, `| gzip -n`.
    #[test]
    fn packed_modules_are_unpacked() {
        for (packing, packed) in [(Packing::Xz, XZ), (Packing::Zstd, ZSTD), (Packing::Gzip, GZIP)] {
            assert_eq!(unpacked(packed, packing).unwrap(), b"module text\n", "{packing:?}");
            let half = packed.split_at(packed.len() / 2).0;
            assert!(unpacked(half, packing).is_err(), "{packing:?}: a file cut short");
            assert!(unpacked(b"no such thing", packing).is_err(), "{packing:?}");
        }
    }

    const XZ: &[u8] = &[
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x01, 0x69, 0x22, 0xde, 0x36, 0x02, 0x00, 0x21, 0x01, 0x10,
        0x00, 0x00, 0x00, 0xa8, 0x70, 0x8e, 0x86, 0x01, 0x00, 0x0b, 0x6d, 0x6f, 0x64, 0x75, 0x6c, 0x65, 0x20,
        0x74, 0x65, 0x78, 0x74, 0x0a, 0x00, 0x5d, 0x15, 0x94, 0xc4, 0x00, 0x01, 0x20, 0x0c, 0xa2, 0xdd, 0xb4,
        0xbc, 0x90, 0x42, 0x99, 0x0d, 0x01, 0x00, 0x00, 0x00, 0x00, 0x01, 0x59, 0x5a,
    ];
    const ZSTD: &[u8] = &[
        0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x61, 0x00, 0x00, 0x6d, 0x6f, 0x64, 0x75, 0x6c, 0x65, 0x20, 0x74,
        0x65, 0x78, 0x74, 0x0a, 0x93, 0xfa, 0x0d, 0x26,
    ];
    const GZIP: &[u8] = &[
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0xcb, 0xcd, 0x4f, 0x29, 0xcd, 0x49, 0x55,
        0x28, 0x49, 0xad, 0x28, 0xe1, 0x02, 0x00, 0x5d, 0x15, 0x94, 0xc4, 0x0c, 0x00, 0x00, 0x00,
    ];
}
