//! The `divvy` command line; also a kubectl plugin when linked as `kubectl-divvy`.
//!
//! With the feature `demo` it is a multi-call binary: started under the name of the node daemon,
//! the OCI hook or a program of the GPU driver, it runs that program. The demo's simulated node
//! links to it, and `cargo run` builds nothing else.

mod allocate;
mod check;
#[cfg(feature = "demo")]
mod demo;
mod documents;
mod explain;
mod import;
mod node;
mod playground;
mod preflight;
mod run;
mod shell;
mod template;
mod top;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::process::ExitCode;

/// Any GPU, cut any way, per claim.
#[derive(Parser)]
#[command(name = "divvy", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the real driver on a simulated node: publish, allocate, prepare and release claims
    #[cfg(feature = "demo")]
    Demo(demo::DemoArguments),
    /// Draw the demo's GPUs (used by the demo itself)
    #[cfg(feature = "demo")]
    #[command(hide = true)]
    Map(demo::map::MapArguments),
    /// Show which devices claims would get, or why none, from ResourceSlices and DeviceClasses in files
    Allocate(allocate::AllocateArguments),
    /// Check claims, templates, classes, pods and node configurations in files
    Check(check::CheckArguments),
    /// Explain a node configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Convert the configuration of other tools to Divvy's
    #[command(subcommand)]
    Import(import::ImportCommand),
    /// Show the health of a node's GPUs, and release or forget one
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Start, show or remove a Kubernetes cluster with simulated GPUs on this machine
    #[command(subcommand)]
    Playground(playground::PlaygroundCommand),
    /// Check whether a cluster can run Divvy, and write values for the chart
    Preflight(preflight::PreflightArguments),
    /// Print the ResourceSlices that a node of a type will publish, for autoscalers
    Template(template::TemplateArguments),
    /// Show requests, limits, usage and throttling of the shares of a node
    Top(top::TopArguments),
    /// Print or apply a pod with a claim for part of a GPU, a MIG instance or a whole GPU
    Run(run::RunArguments),
    /// Print the completions of a shell
    Completions(shell::CompletionsArguments),
    /// Print the manual page, or write one for each command
    Man(shell::ManArguments),
    /// Print the version, commit and platform
    Version(shell::VersionArguments),
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Print the settings of each GPU, and the rule that each comes from
    Explain(explain::ExplainArguments),
}

/// The commands of the help text, in groups.
const GROUPS: &[(&str, &[&str])] = &[
    #[cfg(feature = "demo")]
    ("Try it without a GPU", &["demo", "playground"]),
    #[cfg(not(feature = "demo"))]
    ("Try it without a GPU", &["playground"]),
    ("Before you apply a manifest", &["check", "allocate", "run"]),
    ("Set up a cluster", &["preflight", "config", "template", "import"]),
    ("Inspect a node", &["top", "node"]),
    ("About this program", &["completions", "man", "version"]),
];

/// The command line with a grouped help text: clap groups only options.
fn command() -> clap::Command {
    let command = Arguments::command();
    let mut help = "{about}\n\n{usage-heading} {usage}\n".to_owned();
    for (heading, names) in GROUPS {
        help.push_str(&format!("\n{heading}:\n"));
        for subcommand in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
            help.push_str(&format!("  {:<13}{about}\n", subcommand.get_name()));
        }
    }
    help.push_str("\nOptions:\n{options}");
    command.help_template(help)
}

/// Lets SIGPIPE end the program, as other command-line tools: `divvy template | head` is no error.
/// Rust ignores the signal by default.
#[allow(unsafe_code, reason = "no safe function sets the disposition of a signal")]
fn end_at_closed_output() {
    // SAFETY: the default disposition runs no code of this program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

fn main() -> ExitCode {
    #[cfg(feature = "demo")]
    if let Some(code) = demo::as_another_program() {
        return code;
    }
    #[cfg(feature = "demo")]
    let handles_closed_output = std::env::args_os().nth(1).is_some_and(|command| command == "demo");
    #[cfg(not(feature = "demo"))]
    let handles_closed_output = false;
    if !handles_closed_output {
        end_at_closed_output();
    }
    let arguments = match Arguments::from_arg_matches(&command().get_matches()) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let outcome = match arguments.command {
        #[cfg(feature = "demo")]
        Command::Demo(arguments) => demo::run(&arguments),
        #[cfg(feature = "demo")]
        Command::Map(arguments) => demo::map::run(&arguments),
        Command::Allocate(arguments) => allocate::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Config(ConfigCommand::Explain(arguments)) => explain::run(&arguments),
        Command::Import(command) => import::run(&command),
        Command::Node(command) => node::run(&command),
        Command::Playground(command) => playground::run(&command),
        Command::Preflight(arguments) => preflight::run(&arguments),
        Command::Template(arguments) => template::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Completions(arguments) => shell::completions(&arguments, command()),
        Command::Man(arguments) => shell::man(&arguments, command()),
        Command::Version(arguments) => shell::version(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("divvy: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_every_command() {
        command().debug_assert();
        let shown = Arguments::command();
        let shown = shown.get_subcommands().filter(|one| !one.is_hide_set()).map(clap::Command::get_name);
        let grouped = |name: &&str| GROUPS.iter().any(|(_, names)| names.contains(name));
        assert_eq!(shown.filter(|name| !grouped(name)).collect::<Vec<_>>(), [""; 0]);
    }
}
