//! The vfiod agent.
