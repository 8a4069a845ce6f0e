//! PCI functions as sysfs shows them.

mod address;
mod class;
mod function;

pub use address::{Address, BadAddress};
pub use class::{Class, Role, role};
pub use function::{Function, FunctionError, Functions, functions, read};
