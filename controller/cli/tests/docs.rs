//! Runs every `console` block of `docs/src`, page by page in a new directory, and checks every
//! `yaml` block with `divvy check`. A block that is not run gives a reason, and there are few of
//! them.
//!
//! `cargo run -- ` is replaced by the `divvy` binary that is already built.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A fenced block.
struct Block {
    page: PathBuf,
    line: usize,
    /// Text after the language, for example `,not-run="takes minutes"`.
    attributes: String,
    text: String,
}

impl Block {
    /// The commands. `> ` continues the command above with a line of a here-document.
    fn commands(&self) -> impl Iterator<Item = &str> {
        self.text.lines().filter_map(|line| line.strip_prefix("$ ").or_else(|| line.strip_prefix("> ")))
    }

    fn not_run(&self) -> Option<&str> {
        self.attributes.split_once("not-run=\"").map(|(_, rest)| rest.trim_end_matches('"'))
    }
}

/// All blocks of a language.
fn blocks(language: &str) -> Vec<Block> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src");
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(&docs).expect("docs/src").map(|entry| entry.expect("entry").path()).collect();
    pages.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md"));
    pages.sort();
    pages
        .into_iter()
        .filter(|page| page.extension().is_some_and(|ext| ext == "md"))
        .flat_map(|page| blocks_of(&page, &format!("```{language}")))
        .collect()
}

fn blocks_of(page: &Path, fence: &str) -> Vec<Block> {
    let text = std::fs::read_to_string(page).expect("page");
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        match &mut open {
            None => {
                let attributes = line.strip_prefix(fence).map(str::to_owned);
                open = attributes.map(|attributes| Block {
                    page: page.to_owned(),
                    line: index + 1,
                    attributes,
                    text: String::new(),
                });
            }
            Some(_) if line.trim_end() == "```" => found.extend(open.take()),
            Some(block) => block.text.extend([line, "\n"]),
        }
    }
    found
}

/// `cargo test --workspace` would run this test recursively.
fn is_recursive(command: &str) -> bool {
    command.starts_with("cargo test")
}

#[test]
fn every_command_in_the_docs_succeeds() {
    let divvy = Path::new(env!("CARGO_BIN_EXE_divvy"));
    let binaries = tempfile::tempdir().expect("a directory");
    for name in ["divvy", "divvy-sim"] {
        std::os::unix::fs::symlink(divvy, binaries.path().join(name)).expect("a link");
    }
    let path = format!("{}:{}", binaries.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut pages: Vec<(PathBuf, String)> = Vec::new();
    for block in blocks("console").into_iter().filter(|block| block.not_run().is_none()) {
        let mut commands = format!("echo 'line {}' >&2\n", block.line);
        for line in block.commands().filter(|line| !is_recursive(line)) {
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
fn few_blocks_are_not_run_and_give_a_reason() {
    let not_run: Vec<String> =
        blocks("console").iter().filter_map(|block| block.not_run().map(str::to_owned)).collect();
    assert!(not_run.iter().all(|reason| reason.len() > 10), "{not_run:?}");
    assert!(not_run.len() <= 10, "{} blocks are not run", not_run.len());
}

/// Completes a part of an object to the smallest valid object. `None` if `divvy check` does not
/// check such parts.
fn complete(part: &str) -> Option<String> {
    let nested = |above: &str, by: usize| {
        let part: String = part.lines().map(|line| format!("{}{line}\n", " ".repeat(by))).collect();
        format!("apiVersion: resource.k8s.io/v1\n{above}{part}")
    };
    let claim = "kind: ResourceClaim\nmetadata: {name: c}\nspec:\n  devices:\n";
    let request = "    requests:\n    - name: gpu\n      exactly:\n        deviceClassName: gpu.divvy.dev\n";
    let class = "kind: DeviceClass\nmetadata: {name: c}\nspec:\n  config:\n  - opaque:\n\
        \x20     driver: gpu.divvy.dev\n";
    Some(match part.split_once(':').expect("a field").0 {
        "apiVersion" => part.to_owned(),
        "requests" => nested(claim, 4),
        "config" => nested(&format!("{claim}{request}"), 4),
        "selectors" => nested(&format!("{claim}{request}"), 8),
        "parameters" => nested(class, 6),
        // A part of a container.
        "resources" => return None,
        other => panic!("no object contains a part that begins with {other}"),
    })
}

#[test]
fn every_yaml_block_passes_divvy_check() {
    for block in blocks("yaml") {
        let Some(object) = complete(&block.text) else { continue };
        let mut check = Command::new(env!("CARGO_BIN_EXE_divvy"));
        check.args(["check", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut check = check.spawn().expect("divvy starts");
        check.stdin.take().expect("its input").write_all(object.as_bytes()).expect("written");
        let out = check.wait_with_output().expect("it exits");
        let (found, summary) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let is_valid = out.status.success() && found.is_empty() && !summary.starts_with("checked: 0");
        assert!(is_valid, "{}:{}\n{object}\n{found}{summary}", block.page.display(), block.line);
    }
}
