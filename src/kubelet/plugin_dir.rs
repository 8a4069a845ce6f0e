//! The watch on `device-plugins/`: tells when the kubelet's socket is a new one, or any socket went.
//!
//! ```text
//!            directory missing                      inotify works
//!  Looking ──────────────────▶ Absent(poll, backs off)   ┌──────────────┐
//!     │ ▲                        │ it is there           ▼              │ event, overflow, recheck
//!     │ └────────────────────────┴──────────────── Watching ────────────┘  = look again
//!     │                                                   │ directory removed, moved or replaced
//!     ▼ no inotify left (limit)                           ▼
//!  Polling (every `poll`) ─────────────────────────▶ Looking
//! ```
//!
//! The DIRECTORY is watched: a watch on a file follows its inode and never sees the file made anew. What an event
//! says is not looked at: each one means only "look again", so that a lost or overflowing event costs nothing.
//! Kubelet facts: at its start it deletes every socket in the directory, then makes `kubelet.sock`
//! (`pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go`).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{KUBELET_SOCKET, KubeletDir};
use crate::uds::socket::SocketId;

/// What was last seen in the directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluginDirState {
    /// How often something happened: a change of this number alone says "look at your own socket again".
    pub looks: u64,
    /// The kubelet's socket, `None` while there is none. Another id is another kubelet, or the same started again.
    pub kubelet: Option<SocketId>,
}

/// How often to look where nothing tells us to.
#[derive(Clone, Copy, Debug)]
pub struct PluginDirSettings {
    /// The first pause between two looks for a directory that is not there; doubles up to `poll`.
    pub first: Duration,
    /// The pause between two looks without inotify.
    pub poll: Duration,
    /// The pause between two looks with inotify, against what it cannot see (a mount put over the directory).
    pub recheck: Duration,
}

impl Default for PluginDirSettings {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(50),
            poll: Duration::from_secs(1),
            recheck: Duration::from_secs(30),
        }
    }
}

/// The watch itself; [`PluginDir::run`] is its task.
#[derive(Debug)]
pub struct PluginDir {
    directory: PathBuf,
    settings: PluginDirSettings,
    out: watch::Sender<PluginDirState>,
}

impl PluginDir {
    /// A watch on `kubelet`'s `device-plugins/`. What is there now is in the receiver from the start.
    #[must_use]
    pub fn new(kubelet: &KubeletDir, settings: PluginDirSettings) -> (Self, watch::Receiver<PluginDirState>) {
        let directory = kubelet.device_plugins();
        let kubelet = SocketId::at(&directory.join(KUBELET_SOCKET));
        let (out, receiver) = watch::channel(PluginDirState { looks: 0, kubelet });
        (Self { directory, settings, out }, receiver)
    }

    /// Watches until dropped or until nobody listens any more. Never fails: without inotify it polls.
    pub async fn run(self) {
        let mut absent_for = self.settings.first;
        while !self.out.is_closed() {
            match Watch::on(&self.directory) {
                Ok(watch) => {
                    absent_for = self.settings.first;
                    // What happened before the watch stood was not seen by it.
                    self.look();
                    self.follow(&watch).await;
                    self.look();
                    // Directories that come and go must not cost a core.
                    sleep(self.settings.first).await;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    sleep(absent_for).await;
                    absent_for = (absent_for * 2).min(self.settings.poll);
                }
                Err(error) => {
                    tracing::warn!(
                        directory = %self.directory.display(), %error,
                        "cannot watch the kubelet's plugin directory with inotify, polling it instead \
                         (fs.inotify.max_user_instances may be used up)"
                    );
                    sleep(self.settings.poll).await;
                    self.look();
                }
            }
        }
    }

    /// Looks after each event until the directory is no longer the watched one.
    async fn follow(&self, watch: &Watch) {
        loop {
            tokio::select! {
                // Cancel safe: readiness is not lost, and events not read stay in the queue.
                more = watch.event() => match more {
                    Ok(()) => {}
                    Err(error) => {
                        tracing::warn!(directory = %self.directory.display(), %error, "inotify failed, watching anew");
                        return;
                    }
                },
                () = sleep(self.settings.recheck) => {}
                () = self.out.closed() => return,
            }
            if directory_id(&self.directory) != Some(watch.directory) {
                return;
            }
            self.look();
        }
    }

    fn look(&self) {
        let kubelet = SocketId::at(&self.directory.join(KUBELET_SOCKET));
        self.out.send_modify(|state| {
            state.looks = state.looks.wrapping_add(1);
            state.kubelet = kubelet;
        });
    }
}

fn directory_id(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// An inotify instance on one directory.
struct Watch {
    /// The instance as something to read from: what an event says does not matter, so none is taken apart.
    events: Receiver,
    directory: (u64, u64),
}

impl Watch {
    fn on(directory: &Path) -> io::Result<Self> {
        let id = directory_id(directory).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        inotify.add_watch(
            directory,
            AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_ONLYDIR,
        )?;
        let events = Receiver::from_owned_fd_unchecked(inotify.into())?;
        Ok(Self { events, directory: id })
    }

    /// Waits for at least one event and drains the queue (the overflow event is one like any other).
    async fn event(&self) -> io::Result<()> {
        loop {
            self.events.readable().await?;
            let mut any = false;
            // Room for several events of the longest name (inotify(7): NAME_MAX + 1 bytes after each head).
            let mut buffer = [0; 4096];
            loop {
                match self.events.try_read(&mut buffer) {
                    Ok(_) => any = true,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if any {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use tokio::task::JoinSet;
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "a directory moves away here, no file is replaced")]
    async fn sees_the_directory_appear_the_socket_come_go_and_come_again() {
        let root = tempfile::tempdir().unwrap();
        let kubelet = KubeletDir::new(root.path());
        let settings = PluginDirSettings {
            first: Duration::from_millis(1),
            poll: Duration::from_millis(5),
            recheck: Duration::from_secs(3600),
        };
        let (watch, mut seen) = PluginDir::new(&kubelet, settings);
        assert_eq!(seen.borrow().kubelet, None);
        let mut tasks = JoinSet::new();
        tasks.spawn(watch.run());
        fs::create_dir(kubelet.device_plugins()).unwrap();
        let first = UnixListener::bind(kubelet.kubelet_socket()).unwrap();
        let one =
            timeout(LIMIT, seen.wait_for(|state| state.kubelet.is_some())).await.unwrap().unwrap().kubelet;
        fs::remove_file(kubelet.kubelet_socket()).unwrap();
        timeout(LIMIT, seen.wait_for(|state| state.kubelet.is_none())).await.unwrap().unwrap();
        let second = UnixListener::bind(kubelet.kubelet_socket()).unwrap();
        let two =
            timeout(LIMIT, seen.wait_for(|state| state.kubelet.is_some())).await.unwrap().unwrap().kubelet;
        assert_ne!(one, two);

        // Another file of the directory is a look too.
        let looks = seen.borrow_and_update().looks;
        let other = kubelet.device_plugins().join("vfiod-x.sock");
        let third = UnixListener::bind(&other).unwrap();
        timeout(LIMIT, seen.wait_for(|state| state.looks > looks)).await.unwrap().unwrap();

        // The directory made anew is watched anew.
        fs::rename(kubelet.device_plugins(), root.path().join("old")).unwrap();
        timeout(LIMIT, seen.wait_for(|state| state.kubelet.is_none())).await.unwrap().unwrap();
        fs::create_dir(kubelet.device_plugins()).unwrap();
        let fourth = UnixListener::bind(kubelet.kubelet_socket()).unwrap();
        timeout(LIMIT, seen.wait_for(|state| state.kubelet.is_some())).await.unwrap().unwrap();

        drop((first, second, third, fourth, seen));
        timeout(LIMIT, tasks.join_next()).await.unwrap();
    }
}
