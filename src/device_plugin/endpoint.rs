//! The name of a resource's socket.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::uds::socket::MAX_PATH;

/// The domain whose resources are named by their second part alone.
const HOME_DOMAIN: &str = "nvidia.com";

/// The socket file of `resource` in `directory`: the same one at every start, another one for every resource.
///
/// `vfiod-<name>.sock` for `nvidia.com/<name>`, `vfiod-<domain>+<name>.sock` for other domains (a resource name has no
/// `+`). Where the whole path would not fit into a socket address (107 bytes), or the name is none that a file can
/// have, it is `vfiod-<hash>.sock`.
#[must_use]
pub fn endpoint(directory: &Path, resource: &str) -> String {
    let plain = match resource.split_once('/') {
        Some((HOME_DOMAIN, name)) => format!("vfiod-{name}.sock"),
        Some((domain, name)) => format!("vfiod-{domain}+{name}.sock"),
        None => format!("vfiod-+{resource}.sock"),
    };
    let harmless = plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte));
    if harmless && directory.as_os_str().as_bytes().len() + 1 + plain.len() <= MAX_PATH {
        plain
    } else {
        format!("vfiod-{:016x}.sock", fnv1a(resource.as_bytes()))
    }
}

/// FNV-1a, 64 bits: the same in every build, which std's hashers do not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let dir = Path::new("/var/lib/kubelet/device-plugins");
        assert_eq!(endpoint(dir, "nvidia.com/GA102GL_A10"), "vfiod-GA102GL_A10.sock");
        assert_eq!(endpoint(dir, "amd.com/GA102GL_A10"), "vfiod-amd.com+GA102GL_A10.sock");
        // The known FNV-1a value of "a", and a name that would leave the directory.
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert!(!endpoint(dir, "nvidia.com/../../x").contains('/'));
    }

    #[test]
    fn a_path_too_long_becomes_a_hash_that_stays() {
        let resource = format!("nvidia.com/{}", "X".repeat(63));
        let roomy = Path::new("/var/lib/kubelet/device-plugins");
        assert!(endpoint(roomy, &resource).contains("XXXX"), "63 characters fit in the usual directory");
        let deep = format!("/{}", "d".repeat(70));
        let short = endpoint(Path::new(&deep), &resource);
        assert_eq!(short.len(), "vfiod-0123456789abcdef.sock".len());
        assert_eq!(short, endpoint(Path::new(&deep), &resource));
        assert_ne!(short, endpoint(Path::new(&deep), &format!("{resource}Y")));
    }

    #[test]
    fn the_limit_is_exact() {
        let name = "nvidia.com/A";
        let file = "vfiod-A.sock";
        let fits = format!("/{}", "d".repeat(MAX_PATH - 2 - file.len()));
        assert_eq!(endpoint(Path::new(&fits), name), file);
        assert_ne!(endpoint(Path::new(&format!("{fits}d")), name), file);
    }
}
