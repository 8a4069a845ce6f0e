//! `vfiod status`: asks the agent how the node stands.

use std::fmt::Write as _;

use clap::Args;
use serde_json::Value;

use super::{
    End, Failure, NodeArgs, Output, OutputArgs, emit, emit_json, places::Places, runtime, table::render,
};
use crate::status::ask;

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(args: &StatusArgs) -> Result<End, Failure> {
    let places = Places::new(&args.node)?;
    let status = runtime()?.block_on(ask(&places.socket))?;
    match args.output.output {
        Output::Json => emit_json(&status)?,
        Output::Table => emit(&text(&status))?,
    }
    Ok(End::Done)
}

/// A string of the answer. The answer is read by name, so that another version's agent can be asked too.
fn string(value: &Value, key: &str) -> String {
    match &value[key] {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

fn yes_no(value: &Value, key: &str) -> String {
    if value[key] == Value::Bool(true) { "yes" } else { "no" }.to_owned()
}

fn text(status: &Value) -> String {
    let mut out = format!(
        "{}: {} for {} (vfiod {}, process {}, {} passes, last: {})\n",
        string(status, "state"),
        string(status, "workload_type"),
        string(status, "consumer"),
        string(status, "version"),
        string(status, "pid"),
        string(status, "passes"),
        string(status, "last_pass"),
    );
    for reason in list(status, "reasons") {
        let _ = writeln!(out, "  {}: {}", string(reason, "code"), string(reason, "message"));
    }
    let groups = list(status, "groups").map(|group| {
        let functions: Vec<_> = list(group, "functions").filter_map(Value::as_str).collect();
        let codes: Vec<_> = list(group, "reasons").map(|reason| string(reason, "code")).collect();
        vec![string(group, "group"), yes_no(group, "right"), functions.join(" "), codes.join(",")]
    });
    let groups =
        render(&["group", "right", "functions", "why not"], groups.collect(), "No GPU on this node.");
    let offers = list(status, "offers").map(|offer| {
        let codes: Vec<_> = list(offer, "reasons").map(|reason| string(reason, "code")).collect();
        vec![
            string(offer, "resource"),
            string(offer, "id"),
            yes_no(offer, "healthy"),
            yes_no(offer, "given_out"),
            codes.join(","),
        ]
    });
    let offers = render(
        &["resource", "id", "healthy", "given out", "why not"],
        offers.collect(),
        "Nothing is offered.",
    );
    let registrations =
        status["registrations"].as_object().into_iter().flatten().map(|(resource, registration)| {
            let failure = string(&registration["failure"], "message");
            vec![resource.clone(), string(registration, "state"), failure]
        });
    let kubelet =
        render(&["resource", "kubelet", "trouble"], registrations.collect(), "Nothing is registered.");
    let _ = write!(out, "\n{groups}\n{offers}\n{kubelet}");
    out
}
