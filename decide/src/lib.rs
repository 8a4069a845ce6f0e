//! What is decided about a node's GPUs: plain data and pure functions, and most of vfiod's tests.
//!
//! ```text
//!  [wish] ─────▶ Desired ─────────┐
//!  [inventory] ◀─ what was read ──┼─▶ [plan] ──▶ Plan: units, each with its [step]s, or its [refusal]s
//!  [usage]: holds, pods, claims ──┘      │
//!                                        ▼
//!                 [offers] ──▶ Offer ──▶ [allocate] ──▶ [grant], for its consumer
//! ```
//! Nothing here touches a file, a socket, a clock or a thread: the agent reads, and publishers convert. So it depends on
//! no tokio, no tonic, and no kubelet's types (`tests/rooms.rs` of the agent keeps that).

#![forbid(unsafe_code)]

pub mod allocate;
pub mod consumer;
pub mod grant;
pub mod id;
pub mod inventory;
pub mod names;
pub mod offers;
pub mod plan;
pub mod prior;
pub mod refusal;
pub mod step;
pub mod tie;
pub mod unit;
pub mod usage;
pub mod wish;
