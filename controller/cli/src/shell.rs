//! Commands about the command line itself: completions, manual pages and the version.

use anyhow::{Context, Result};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const COMPLETIONS_HELP: &str = "\
Examples:
  divvy completions bash > /etc/bash_completion.d/divvy
  divvy completions zsh > \"${fpath[1]}/_divvy\"
  divvy completions fish > ~/.config/fish/completions/divvy.fish";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = COMPLETIONS_HELP)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

const MAN_HELP: &str = "\
Examples:
  divvy man | man -l -
  divvy man --dir /usr/local/share/man/man1";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = MAN_HELP)]
pub(crate) struct ManArguments {
    /// Write a page for each command into this directory instead of printing the main page
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

const VERSION_HELP: &str = "\
Examples:
  divvy version
  divvy version -o json";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = VERSION_HELP)]
pub(crate) struct VersionArguments {
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

/// Prints the completions of a shell.
pub(crate) fn completions(arguments: &CompletionsArguments, mut command: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "divvy", &mut script);
    std::io::stdout().write_all(&script).context("cannot write the completions")?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual page, or writes one for each command.
pub(crate) fn man(arguments: &ManArguments, command: clap::Command) -> Result<ExitCode> {
    let Some(dir) = &arguments.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page).context("cannot render the page")?;
        std::io::stdout().write_all(&page).context("cannot write the page")?;
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    write_pages(command, "divvy", dir)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and of those below it: `divvy-import-mig-parted.1`.
fn write_pages(command: clap::Command, name: &str, dir: &Path) -> Result<()> {
    let visible = command.get_subcommands().filter(|one| !one.is_hide_set());
    for below in visible.cloned().collect::<Vec<_>>() {
        let name = format!("{name}-{}", below.get_name());
        write_pages(below, &name, dir)?;
    }
    let mut page = Vec::new();
    let man = clap_mangen::Man::new(command.display_name(name.to_owned())).title(name.to_owned());
    man.render(&mut page).context("cannot render the page")?;
    let file = dir.join(format!("{name}.1"));
    std::fs::write(&file, page).with_context(|| file.display().to_string())
}

/// The commit and the target of the build, from the build script.
const COMMIT: &str = env!("DIVVY_COMMIT");
const TARGET: &str = env!("DIVVY_TARGET");

/// Prints the version, the commit and the platform.
pub(crate) fn version(arguments: &VersionArguments) -> Result<ExitCode> {
    let (version, commit, target) = (env!("CARGO_PKG_VERSION"), COMMIT, TARGET);
    match arguments.output {
        Output::Text => println!("divvy {version} (commit {commit}, {target})"),
        Output::Json => {
            let facts = json!({"version": version, "commit": commit, "target": target});
            println!("{}", serde_json::to_string_pretty(&facts)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_manual_page() {
        let dir = tempfile::tempdir().expect("a directory");
        let arguments = ManArguments { dir: Some(dir.path().to_owned()) };
        man(&arguments, crate::command()).expect("pages");
        for name in ["divvy", "divvy-check", "divvy-import-mig-parted", "divvy-config-explain"] {
            let page = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).expect(name);
            assert!(page.contains(".SH NAME"), "{page}");
        }
    }

    #[test]
    fn each_command_has_examples() {
        // The examples of a group may be in its own help.
        fn without(command: &clap::Command, name: &str, above: bool, found: &mut Vec<String>) {
            let below: Vec<_> = command.get_subcommands().filter(|one| !one.is_hide_set()).collect();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let has = above || help.contains("divvy ");
            if below.is_empty() && !has {
                found.push(name.to_owned());
            }
            below.iter().for_each(|one| without(one, &format!("{name} {}", one.get_name()), has, found));
        }
        let mut found = Vec::new();
        without(&crate::command(), "divvy", false, &mut found);
        assert_eq!(found, [""; 0]);
    }
}
