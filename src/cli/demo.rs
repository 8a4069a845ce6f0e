//! demo
use super::{End, Failure, emit};
use clap::Args;
use std::path::PathBuf;
use vfio::sim::{Profile, Simulation};
/// Demo.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Lay the simulated node below DIR and end, to try the other subcommands on it with --root DIR
    #[arg(long, value_name = "DIR")]
    lay: Option<PathBuf>,
    /// Which node
    #[arg(long, value_name = "NAME", default_value = "hgx-h100")]
    profile: String,
}
pub fn run(args: &DemoArgs) -> Result<End, Failure> {
    let profile =
        Profile::built_in().into_iter().find(|p| p.name == args.profile).ok_or("no such profile")?;
    if let Some(dir) = &args.lay {
        Simulation::create(dir, &profile)?;
        emit("laid\n")?;
    }
    Ok(End::Done)
}
