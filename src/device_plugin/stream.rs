//! The ListAndWatch streams of a session: each with its own state, all counted.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::offer::Device;
use crate::kubelet::proto::v1beta1;

/// Which streams of a session were opened and which are still open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamLog {
    /// How many were opened; also the number of the newest.
    pub(super) opened: u64,
    open: BTreeSet<u64>,
}

impl StreamLog {
    /// Whether the stream opened last is still open. Only this one counts: an older one that ends later was replaced.
    pub(super) fn newest_open(&self) -> bool {
        self.open.contains(&self.opened)
    }
}

/// One stream in the log; its end is written when it is dropped.
struct Entry {
    number: u64,
    log: Arc<watch::Sender<StreamLog>>,
}

impl Entry {
    fn open(log: Arc<watch::Sender<StreamLog>>) -> Self {
        let mut number = 0;
        log.send_modify(|streams| {
            streams.opened += 1;
            number = streams.opened;
            streams.open.insert(number);
        });
        Self { number, log }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.log.send_modify(|streams| {
            streams.open.remove(&self.number);
        });
    }
}

/// Sends the whole list at once and whenever it differs from what this very stream sent last; ends with its session.
pub(super) struct DeviceStream {
    devices: WatchStream<Vec<Device>>,
    sent: Option<Vec<Device>>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    _entry: Entry,
}

impl DeviceStream {
    pub(super) fn new(
        devices: watch::Receiver<Vec<Device>>,
        log: Arc<watch::Sender<StreamLog>>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            devices: WatchStream::new(devices),
            sent: None,
            stop: Box::pin(stop.cancelled_owned()),
            _entry: Entry::open(log),
        }
    }
}

impl Stream for DeviceStream {
    type Item = Result<v1beta1::ListAndWatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.stop.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        loop {
            match std::task::ready!(Pin::new(&mut self.devices).poll_next(context)) {
                // A change there and back that this stream has not seen is no message.
                Some(devices) if self.sent.as_ref() == Some(&devices) => {}
                Some(devices) => {
                    let message = message(&devices);
                    self.sent = Some(devices);
                    return Poll::Ready(Some(Ok(message)));
                }
                // The sender lives as long as the session; without it there is nothing more to say.
                None => return Poll::Ready(None),
            }
        }
    }
}

/// The list as the kubelet reads it.
fn message(devices: &[Device]) -> v1beta1::ListAndWatchResponse {
    let devices = devices
        .iter()
        .map(|device| v1beta1::Device {
            id: device.id.clone(),
            health: if device.healthy { v1beta1::HEALTHY } else { v1beta1::UNHEALTHY }.to_owned(),
            topology: device
                .numa_node
                .map(|node| v1beta1::TopologyInfo { nodes: vec![v1beta1::NumaNode { id: i64::from(node) }] }),
        })
        .collect();
    v1beta1::ListAndWatchResponse { devices }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;
    use tokio_stream::StreamExt;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn device(id: &str, healthy: bool) -> Device {
        Device { id: id.into(), healthy, numa_node: None }
    }

    async fn health(stream: &mut DeviceStream) -> Option<String> {
        let message = timeout(LIMIT, stream.next()).await.unwrap()?.unwrap();
        Some(message.devices.iter().map(|device| device.health.chars().next().unwrap()).collect())
    }

    #[tokio::test]
    async fn every_stream_gets_every_state_and_only_differences() {
        let (devices, receiver) = watch::channel(vec![device("a", true)]);
        let log = Arc::new(watch::Sender::new(StreamLog::default()));
        let stop = CancellationToken::new();
        let mut one = DeviceStream::new(receiver.clone(), Arc::clone(&log), stop.clone());
        let mut two = DeviceStream::new(receiver, Arc::clone(&log), stop.clone());
        assert_eq!(health(&mut one).await.unwrap(), "H");
        assert_eq!(health(&mut two).await.unwrap(), "H");
        devices.send_replace(vec![device("a", false)]);
        assert_eq!(health(&mut one).await.unwrap(), "U");
        devices.send_replace(vec![device("a", true)]);
        // The second stream was away for the change and back: nothing to say until something differs.
        devices.send_replace(vec![device("a", true), device("b", true)]);
        assert_eq!(health(&mut one).await.unwrap(), "HH");
        assert_eq!(health(&mut two).await.unwrap(), "HH");

        // The same again is no message.
        devices.send_replace(vec![device("a", true), device("b", true)]);
        tokio::select! {
            biased;
            more = one.next() => panic!("{more:?}"),
            () = std::future::ready(()) => {}
        }

        assert_eq!(log.borrow().opened, 2);
        drop(one);
        assert!(log.borrow().newest_open(), "the end of an older stream does not count");
        stop.cancel();
        assert_eq!(health(&mut two).await, None);
        drop(two);
        assert!(!log.borrow().newest_open());
    }

    #[test]
    fn no_numa_node_is_no_topology() {
        let sent =
            message(&[device("a", true), Device { id: "b".into(), healthy: false, numa_node: Some(1) }]);
        assert_eq!(sent.devices[0].topology, None);
        assert_eq!(sent.devices[1].topology.as_ref().unwrap().nodes[0].id, 1);
        assert_eq!(
            (sent.devices[0].health.as_str(), sent.devices[1].health.as_str()),
            ("Healthy", "Unhealthy")
        );
    }
}
