//! The host kernel's side of GPU passthrough.
