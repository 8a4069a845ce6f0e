//! PCI functions as sysfs shows them.

mod address;
pub mod bar;
mod class;
pub mod config;
mod details;
mod function;
mod hex;
mod identity;
pub mod life;
pub mod link;
mod reset;
mod role;
mod topology;

pub use address::{Address, BadAddress};
pub use bar::Bar;
pub use class::{Class, Role};
pub use config::{Capability, ConfigSpace, Express, PortType};
pub use details::{ConfigView, Details, details};
pub use function::{Function, FunctionError, Functions, functions, functions_by, read, read_busy};
pub use identity::Identity;
pub use life::Life;
pub use link::{Link, LinkSpeed};
pub use reset::ResetMethods;
pub use role::role;
pub use topology::{Hop, Topology};
