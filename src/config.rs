//! The agent's config file.
//!
//! YAML, every key optional, an empty file is all defaults:
//!
//! ```yaml
//! workloadType: vm-passthrough      # container | vm-passthrough | vm-vgpu; no default: without it nothing is asked
//! consumer: kubevirt                # kubevirt | kata
//! adoptBootBound: false             # give functions bound to vfio by ids at boot to the host driver as well
//! names:
//!   prefer: builtIn                 # builtIn | nodeFile: which pci.ids decides where both know a device
//!   file: /etc/vfiod/pci.ids        # the node's pci.ids, if not at one of the usual places
//! holdGraceSeconds: 60              # an answered Allocate counts this long without PodResources showing it
//! writeDeadlineSeconds: 10          # a kernel write that takes longer is given up, its group is wedged
//! rescanSeconds: 30                 # look at everything again this often, whatever woke the loop meanwhile
//! blockedRetrySeconds: 5            # look again this soon where something in use blocks a change
//! podResourcesDeadlineSeconds: 5    # the kubelet's answer counts as unknown after that
//! ```
//!
//! A key that is not known, a value that does not fit or lies out of bounds refuses the whole file with the line: nothing of
//! it is applied.

use std::{
    fmt, fs, io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use decide::{
    consumer::Consumer,
    names::Prefer,
    wish::{Said, WorkloadType},
};
use reason::{Code, Coded};
use serde::Deserialize;
use serde_saphyr::{Location, Spanned, UserMessageFormatter};

/// The largest file that is read.
const LARGEST: u64 = 1 << 20;

/// The bounds of every interval and deadline, in seconds.
const SECONDS: RangeInclusive<u64> = 1..=3600;

/// What the config file says, defaults filled in. Compared by value to see whether a changed file changes anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `workloadType`: what the node's GPUs shall serve. `None`: the file asks for nothing.
    pub workload_type: Option<WorkloadType>,
    /// `consumer`: who takes the devices of a VM type. `None`: KubeVirt, if nobody else says.
    pub consumer: Option<Consumer>,
    /// `adoptBootBound`: give functions that the kernel bound to vfio by ids at boot to the host driver as well, on the
    /// way back to containers. `None`: no, if nobody else says.
    pub adopt_boot_bound: Option<bool>,
    /// `names`: where resource names come from.
    pub names: NamesConfig,
    /// `holdGraceSeconds`: how long an answered Allocate counts as in use without PodResources having shown it.
    /// Default 60 s.
    pub hold_grace: Duration,
    /// `writeDeadlineSeconds`: past this a kernel write is given up and its group is wedged. Default 10 s.
    pub write_deadline: Duration,
    /// `rescanSeconds`: how often all is looked at without a cause. Default 30 s.
    pub rescan: Duration,
    /// `blockedRetrySeconds`: how soon a change that something in use blocks is tried again. Default 5 s.
    pub blocked_retry: Duration,
    /// `podResourcesDeadlineSeconds`: past this the kubelet's PodResources answer counts as unknown. Default 5 s.
    pub pod_resources_deadline: Duration,
}

/// Where resource names come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NamesConfig {
    /// `names.prefer`: the source that decides where both know a device. Default the built-in database.
    pub prefer: Prefer,
    /// `names.file`: the node's pci.ids, an absolute path of the host. `None`: the usual places are looked at.
    pub file: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workload_type: None,
            consumer: None,
            adopt_boot_bound: None,
            names: NamesConfig::default(),
            hold_grace: Duration::from_secs(60),
            write_deadline: Duration::from_secs(10),
            rescan: Duration::from_secs(30),
            blocked_retry: Duration::from_secs(5),
            pod_resources_deadline: Duration::from_secs(5),
        }
    }
}

/// A config file of which nothing is applied.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read, or is no UTF-8.
    #[error("cannot read config file {path}: it must be there, readable by the agent, and UTF-8", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// No YAML, a key that is not known, or a value of the wrong kind.
    #[error("config file {place} does not fit, nothing of it is applied: {reason}")]
    Parse {
        /// File and line.
        place: Place,
        /// What the parser expected and found, one line.
        reason: String,
    },
    /// An interval or deadline that is no number of seconds, or out of bounds.
    #[error("config file {place}: {key}: {value:?} does not fit, nothing of the file is applied: give a whole number of seconds from {low} to {high}, or leave the key out for {default}", low = SECONDS.start(), high = SECONDS.end())]
    Seconds {
        /// File and line.
        place: Place,
        /// The key as spelt in the file.
        key: &'static str,
        /// The value as given.
        value: String,
        /// The key's default, in seconds.
        default: u64,
    },
    /// A path that is not absolute: the agent's working directory says nothing about the host.
    #[error(
        "config file {place}: names.file: {value:?} is not an absolute path, nothing of the file is applied: start it with /"
    )]
    RelativePath {
        /// File and line.
        place: Place,
        /// The path given.
        value: String,
    },
}

impl Coded for ConfigError {
    fn code(&self) -> Code {
        Code::ConfigRefused
    }

    fn retryable(&self) -> bool {
        false
    }
}

/// Where in which file. Shown as `path:line:column`, or `path` alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Line and column, counted from 1; `None` where the parser has none.
    pub at: Option<(u64, u64)>,
}

impl Place {
    fn new(path: &Path, location: Option<Location>) -> Self {
        // The parser's line 0 stands for "not known".
        let at = location.map(|at| (at.line(), at.column())).filter(|(line, _)| *line > 0);
        Self { path: path.to_owned(), at }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.at.map_or(Ok(()), |(line, column)| write!(f, ":{line}:{column}"))
    }
}

/// The file as it is spelt. Numbers come as text: the parser's own "invalid u64" names neither key nor bounds.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct File {
    workload_type: Option<WorkloadType>,
    consumer: Option<Consumer>,
    adopt_boot_bound: Option<bool>,
    names: Option<Names>,
    hold_grace_seconds: Option<Spanned<String>>,
    write_deadline_seconds: Option<Spanned<String>>,
    rescan_seconds: Option<Spanned<String>>,
    blocked_retry_seconds: Option<Spanned<String>>,
    pod_resources_deadline_seconds: Option<Spanned<String>>,
}

/// `names` as it is spelt.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Names {
    prefer: Option<Prefer>,
    file: Option<Spanned<String>>,
}

impl Config {
    /// What it says of the wish.
    #[must_use]
    pub fn said(&self) -> Said {
        let Self { workload_type, consumer, adopt_boot_bound, .. } = *self;
        Said { workload_type, consumer, adopt_boot_bound }
    }

    /// Reads and checks the config file at `path`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] when the file cannot be read (one that is not there too) or does not fit as a whole.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        // A pipe or a device in its place would never come to an end.
        let meta = fs::metadata(path).map_err(failed)?;
        if !meta.is_file() || meta.len() > LARGEST {
            return Err(failed(io::Error::other("it is not a plain file of at most 1 MiB")));
        }
        Self::parse(&fs::read_to_string(path).map_err(failed)?, path)
    }

    /// Checks the text of a config file; `path` is for the errors.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] when anything in it does not fit.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        // Only true and false: "adoptBootBound: no" as a string of another YAML must not be guessed at.
        let options = serde_saphyr::options! { strict_booleans: true };
        let file = serde_saphyr::from_str_with_options::<Option<File>>(text, options)
            .map_err(|error| parse_error(path, &error))?
            .unwrap_or_default();

        let default = Self::default();
        let seconds = |key, given: Option<Spanned<String>>, default: Duration| {
            let Some(Spanned { value, referenced, .. }) = given else {
                return Ok(default);
            };
            match value.parse() {
                Ok(seconds) if SECONDS.contains(&seconds) => Ok(Duration::from_secs(seconds)),
                _ => Err(ConfigError::Seconds {
                    place: Place::new(path, Some(referenced)),
                    key,
                    value,
                    default: default.as_secs(),
                }),
            }
        };
        Ok(Self {
            workload_type: file.workload_type,
            consumer: file.consumer,
            adopt_boot_bound: file.adopt_boot_bound,
            names: names(file.names.unwrap_or_default(), path)?,
            hold_grace: seconds("holdGraceSeconds", file.hold_grace_seconds, default.hold_grace)?,
            write_deadline: seconds(
                "writeDeadlineSeconds",
                file.write_deadline_seconds,
                default.write_deadline,
            )?,
            rescan: seconds("rescanSeconds", file.rescan_seconds, default.rescan)?,
            blocked_retry: seconds("blockedRetrySeconds", file.blocked_retry_seconds, default.blocked_retry)?,
            pod_resources_deadline: seconds(
                "podResourcesDeadlineSeconds",
                file.pod_resources_deadline_seconds,
                default.pod_resources_deadline,
            )?,
        })
    }
}

fn names(given: Names, path: &Path) -> Result<NamesConfig, ConfigError> {
    let file = match given.file {
        None => None,
        Some(Spanned { value, .. }) if value.starts_with('/') => Some(PathBuf::from(value)),
        Some(Spanned { value, referenced, .. }) => {
            return Err(ConfigError::RelativePath { place: Place::new(path, Some(referenced)), value });
        }
    };
    let prefer = given.prefer.unwrap_or_default();
    Ok(NamesConfig { prefer, file })
}

fn parse_error(path: &Path, error: &serde_saphyr::Error) -> ConfigError {
    // The snippet of several lines is for terminals; this text ends in a log line, an Event and a condition.
    let reason = error.without_snippet().render_with_formatter(&UserMessageFormatter);
    let words: Vec<_> = reason.split_whitespace().collect();
    ConfigError::Parse { place: Place::new(path, error.location()), reason: words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("/etc/vfiod/config.yaml")).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_all_defaults() {
        for text in
            ["", "\n", "# only a comment\n", "---\n", "{}", "names:\nholdGraceSeconds:\n", "names: {}\n"]
        {
            assert_eq!(parse(text), Ok(Config::default()), "{text:?}");
        }
    }

    #[test]
    fn every_key_is_read() {
        let text = "workloadType: vm-passthrough\nconsumer: kata\nadoptBootBound: true\n\
            names:\n  prefer: nodeFile\n  file: /etc/vfiod/pci.ids\n\
            holdGraceSeconds: 1\nwriteDeadlineSeconds: 2\nrescanSeconds: 3600\nblockedRetrySeconds: 4\n\
            podResourcesDeadlineSeconds: 6\n";
        let file = Some(PathBuf::from("/etc/vfiod/pci.ids"));
        let expected = Config {
            workload_type: Some(WorkloadType::VmPassthrough),
            consumer: Some(Consumer::Kata),
            adopt_boot_bound: Some(true),
            names: NamesConfig { prefer: Prefer::NodeFile, file },
            hold_grace: Duration::from_secs(1),
            write_deadline: Duration::from_secs(2),
            rescan: Duration::from_secs(3600),
            blocked_retry: Duration::from_secs(4),
            pod_resources_deadline: Duration::from_secs(6),
        };
        assert_eq!(parse(text), Ok(expected));
    }

    #[test]
    fn seconds_that_do_not_fit_are_named_with_key_value_file_and_line() {
        for value in ["0", "-1", "3601", "99999999999999999999", "30s", "1.5", "true", "~1"] {
            let error = parse(&format!("consumer: kubevirt\nrescanSeconds: {value}\n")).unwrap_err();
            assert_eq!(
                error,
                format!(
                    "config file /etc/vfiod/config.yaml:2:16: rescanSeconds: \"{value}\" does not fit, nothing of the file \
                     is applied: give a whole number of seconds from 1 to 3600, or leave the key out for 30"
                )
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_line() {
        for (text, line, named) in [
            ("workloadType: VM-passthrough\n", "1:15", "vm-passthrough"),
            ("workloadType: vm_vgpu\n", "1:15", "vm_vgpu"),
            ("consumer: docker\n", "1:11", "docker"),
            ("\nadoptBootbound: true\n", "2:1", "adoptBootbound"),
            ("adoptBootBound: yes\n", "1:17", "true"),
            ("names:\n  prefer: both\n", "2:11", "both"),
            ("names:\n  path: /x\n", "2:3", "path"),
            ("rescanSeconds: [1]\n", "1:16", ""),
            ("rescanSeconds: 1\nrescanSeconds: 2\n", "2:1", "rescanSeconds"),
            ("consumer: kata\nnames: [\n", "2:8", ""),
            ("- a list\n", "1:1", ""),
            ("consumer: kata\n---\nconsumer: kubevirt\n", "3:1", ""),
        ] {
            let error = parse(text).unwrap_err();
            let head =
                format!("config file /etc/vfiod/config.yaml:{line} does not fit, nothing of it is applied: ");
            assert!(error.starts_with(&head) && error.contains(named), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_path_of_the_host_is_absolute() {
        assert_eq!(
            parse("names:\n  file: pci.ids\n").unwrap_err(),
            "config file /etc/vfiod/config.yaml:2:9: names.file: \"pci.ids\" is not an absolute path, nothing of the file \
             is applied: start it with /"
        );
    }

    #[test]
    fn a_file_that_is_not_there_is_an_error() {
        let error = Config::load(Path::new("/nonexistent/config.yaml")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read config file /nonexistent/config.yaml: "), "{error}");
    }
}
