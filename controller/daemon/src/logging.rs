//! The log on standard error, as text or JSON.

use crate::args::{LogArgs, LogFormat};
use anyhow::Context;
use std::io::IsTerminal;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// Starts logging; a program calls it once, in `main`.
///
/// # Errors
///
/// Fails if the level is invalid or logging was started before.
pub fn init(args: &LogArgs) -> anyhow::Result<()> {
    let mut filter: Targets = args.log_level.parse().context("--log-level")?;
    if !args.log_level.contains("kube_client") {
        // kube_client logs errors that its callers retry and report themselves.
        filter = filter.with_target("kube_client", LevelFilter::OFF);
    }
    // If a line cannot be written, reporting that on standard error would panic.
    let lines = fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let begun = match args.log_format {
        LogFormat::Text => {
            let lines = lines.with_ansi(std::io::stderr().is_terminal());
            tracing_subscriber::registry().with(lines.with_filter(filter)).try_init()
        }
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true);
            tracing_subscriber::registry().with(lines.with_filter(filter)).try_init()
        }
    };
    Ok(begun?)
}
