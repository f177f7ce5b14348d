//! The book is true: every `console` block in `docs/src` is run, page by page,
//! in a fresh directory; a block that is not run says why, and few are.
//!
//! `cargo run -- ` stands for the `divvy` binary that is already built.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A fenced block of commands.
struct Block {
    page: PathBuf,
    line: usize,
    commands: String,
    not_run: Option<String>,
}

fn blocks() -> Vec<Block> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src");
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(&docs).expect("docs/src").map(|entry| entry.expect("entry").path()).collect();
    pages.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md"));
    pages.sort();
    pages
        .into_iter()
        .filter(|page| page.extension().is_some_and(|ext| ext == "md"))
        .flat_map(|page| blocks_of(&page))
        .collect()
}

fn blocks_of(page: &Path) -> Vec<Block> {
    let text = std::fs::read_to_string(page).expect("page");
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        match (&mut open, line.trim_end()) {
            (None, fence) if fence.starts_with("```console") => {
                let not_run =
                    fence.split_once("not-run=\"").map(|(_, rest)| rest.trim_end_matches('"').to_owned());
                open =
                    Some(Block { page: page.to_owned(), line: index + 1, commands: String::new(), not_run });
            }
            (Some(_), "```") => found.extend(open.take()),
            // `> ` goes on with a here-document of the command above.
            (Some(block), command) if command.starts_with("$ ") || command.starts_with("> ") => {
                block.commands.push_str(&command[2..]);
                block.commands.push('\n');
            }
            _ => {}
        }
    }
    found
}

/// `cargo test --workspace` would run itself for ever.
fn runs_itself(command: &str) -> bool {
    command.starts_with("cargo test")
}

#[test]
fn every_command_in_the_book_works() {
    let divvy = Path::new(env!("CARGO_BIN_EXE_divvy"));
    let binaries = tempfile::tempdir().expect("a directory");
    for name in ["divvy", "divvy-sim"] {
        std::os::unix::fs::symlink(divvy, binaries.path().join(name)).expect("a link");
    }
    let path = format!("{}:{}", binaries.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut pages: Vec<(PathBuf, String)> = Vec::new();
    for block in blocks().into_iter().filter(|block| block.not_run.is_none()) {
        let mut commands = format!("echo 'line {}' >&2\n", block.line);
        for line in block.commands.lines().filter(|line| !runs_itself(line)) {
            commands.push_str(&line.replace("cargo run -- ", "divvy "));
            commands.push('\n');
        }
        match pages.last_mut() {
            Some((page, script)) if *page == block.page => script.push_str(&commands),
            _ => pages.push((block.page, commands)),
        }
    }
    for (page, script) in pages {
        let dir = tempfile::tempdir().expect("a directory");
        let out = Command::new("timeout")
            .args(["120", "bash", "-euo", "pipefail", "-c", &script])
            .current_dir(dir.path())
            .env("PATH", &path)
            .env("TMPDIR", dir.path())
            .output()
            .expect("bash starts");
        assert!(
            out.status.success(),
            "{}: {}\n{}\n{}",
            page.display(),
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
}

#[test]
fn what_is_not_run_says_why_and_is_rare() {
    let not_run: Vec<String> = blocks().into_iter().filter_map(|block| block.not_run).collect();
    assert!(not_run.iter().all(|reason| reason.len() > 10), "{not_run:?}");
    assert!(not_run.len() <= 10, "{} blocks are not run", not_run.len());
}
