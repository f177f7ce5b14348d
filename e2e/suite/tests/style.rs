//! The style of comments and documentation, by rules that a program can check.
//!
//! A habit of phrasing is counted per 1,000 sentences, because a rare exception is fine; lines and
//! test names have hard limits. Failures list every place.

use regex::Regex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Widest line of Rust, in characters.
const LINE_WIDTH_MAX: usize = 110;
/// Longest name of a test function, in characters.
const TEST_NAME_MAX: usize = 60;
/// A sentence with more words is long.
const SENTENCE_WORDS_MAX: usize = 32;
/// A sentence with fewer words is a label or a heading.
const SENTENCE_WORDS_MIN: usize = 4;
/// Limits, in places per 1,000 sentences.
const PHRASES_PER_1000: usize = 5;
const LONG_IN_COMMENTS_PER_1000: usize = 30;
const LONG_IN_DOCS_PER_1000: usize = 60;

const EXTENSIONS: &[&str] = &["rs", "md", "c", "h", "sh", "yaml", "yml", "toml"];
/// Generated files and data.
const SKIPPED: &[&str] =
    &["target", "generated", "rendered", "vectors", "listings", "node_modules", "images"];
/// Modules whose phrases are not checked: the division of GPU time, which is due for a new design.
const PHRASES_UNCHECKED: &[&str] = &["driver/src/shares/scheduler/"];

/// Name of a rule, and a pattern that matches a sentence that breaks it.
const PHRASES: &[(&str, &str)] = &[
    ("starts with who", r"^(Who|Whoever|Whose|Whom)\b[^?]*$"),
    ("starts with what", r"^What\b[^?]*$"),
    (
        "fronted phrase",
        r"^(Of|By|To)\s+(a|an|the|each|every|all|these|those|which|whom|two|three|several|it|one)\b",
    ),
    ("quantity without a name", r"(?i)\b(so much|so many|so long|so often|such a one|as much again)\b"),
    ("no component named", r"(?i)\b(nobody|somebody|whoever|those who|one who|who (has|had|was)|whom)\b"),
    ("is to", r"(?i)\b(is|are|was|were) to (be|have|get|go)\b"),
    ("archaic", r"(?i)\b(all the same|thereof|therein|hereby|by and by|as ever|is had by|had back)\b"),
];

/// A paragraph of prose with the number of its first line.
type Paragraph = (usize, String);

struct Rules {
    phrases: Vec<(&'static str, Regex)>,
    comment: Regex,
    list_item: Regex,
    code_span: Regex,
    link: Regex,
    test_name: Regex,
}

impl Rules {
    fn new() -> Self {
        let regex = |pattern: &str| Regex::new(pattern).expect("a valid pattern");
        Self {
            phrases: PHRASES.iter().map(|(name, pattern)| (*name, regex(pattern))).collect(),
            comment: regex(r"^\s*(?://[/!]?|#|\*|/\*+)(?:\s|$)(.*)"),
            list_item: regex(r"^\s*([-*>]|\d+\.)\s+"),
            code_span: regex(r"`[^`]*`"),
            link: regex(r"\]\([^)]*\)"),
            test_name: regex(r"^\s*(?:async )?fn (\w+)\s*\("),
        }
    }

    /// Comments of a source file, or the text of a Markdown file without code, tables and headings.
    fn prose(&self, is_markdown: bool, text: &str) -> Vec<Paragraph> {
        let mut paragraphs: Vec<Paragraph> = Vec::new();
        let (mut open, mut fenced) = (false, false);
        for (number, line) in text.lines().enumerate() {
            let part = if is_markdown {
                let trimmed = line.trim_start();
                if trimmed.starts_with("```") {
                    fenced = !fenced;
                }
                let markup = ["```", "|", "#", "<", "!", "["].iter().any(|mark| trimmed.starts_with(mark));
                open &= !self.list_item.is_match(line);
                (!fenced && !markup).then(|| self.list_item.replace(line, "").trim().to_owned())
            } else {
                let attribute = line.trim_start().starts_with("#[") || line.starts_with("#!");
                let found = self.comment.captures(line).filter(|_| !attribute);
                found.map(|found| found[1].trim().trim_end_matches(['*', '/', ' ']).to_owned())
            };
            match part.filter(|part| !part.is_empty()) {
                Some(part) if open => {
                    if let Some((_, paragraph)) = paragraphs.last_mut() {
                        paragraph.push(' ');
                        paragraph.push_str(&part);
                    }
                }
                Some(part) => {
                    paragraphs.push((number + 1, part));
                    open = true;
                }
                None => open = false,
            }
        }
        paragraphs
    }

    fn sentences(&self, paragraph: &str) -> Vec<String> {
        let text = self.code_span.replace_all(paragraph, "X");
        let text = self.link.replace_all(&text, "]");
        let mut sentences = vec![String::new()];
        let mut words = text.split_whitespace().peekable();
        while let Some(word) = words.next() {
            let sentence = sentences.last_mut().expect("starts with one sentence");
            if !sentence.is_empty() {
                sentence.push(' ');
            }
            sentence.push_str(word);
            let starts = |next: &&str| next.starts_with(|c: char| c.is_ascii_uppercase() || "[*".contains(c));
            if word.ends_with(['.', '!', '?']) && words.peek().is_some_and(starts) {
                sentences.push(String::new());
            }
        }
        let trimmed = sentences.iter().map(|sentence| sentence.trim_matches([' ', '*', '_']).to_owned());
        trimmed.filter(|sentence| sentence.split(' ').count() >= SENTENCE_WORDS_MIN).collect()
    }
}

/// Places by rule, and the number of sentences that were read.
#[derive(Default)]
struct Report {
    sentences: usize,
    places: BTreeMap<&'static str, Vec<String>>,
}

impl Report {
    fn add(&mut self, rule: &'static str, path: &str, line: usize, text: &str) {
        let excerpt: String = text.chars().take(100).collect();
        self.places.entry(rule).or_default().push(format!("{path}:{line}: {rule}: {excerpt}"));
    }

    fn count(&self, rule: &str) -> usize {
        self.places.get(rule).map_or(0, Vec::len)
    }

    fn read_prose(&mut self, rules: &Rules, path: &str, text: &str) {
        let phrases_checked = !PHRASES_UNCHECKED.iter().any(|prefix| path.starts_with(prefix));
        for (line, paragraph) in rules.prose(path.ends_with(".md"), text) {
            for sentence in rules.sentences(&paragraph) {
                self.sentences += 1;
                if sentence.split(' ').count() > SENTENCE_WORDS_MAX {
                    self.add("long", path, line, &sentence);
                }
                for (name, phrase) in &rules.phrases {
                    if phrases_checked && phrase.is_match(&sentence) {
                        self.add(name, path, line, &sentence);
                    }
                }
            }
        }
    }

    fn read_code(&mut self, rules: &Rules, path: &str, text: &str) {
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > LINE_WIDTH_MAX {
                self.add("width", path, number + 1, line.trim());
            }
            if let Some(name) = rules.test_name.captures(line)
                && name[1].len() > TEST_NAME_MAX
            {
                self.add("test name", path, number + 1, &name[1]);
            }
        }
    }

    /// Fails with the places of these rules if there are more than allowed.
    fn check(&self, what: &str, rules: &[&str], allowed: usize) {
        let places: Vec<&str> =
            rules.iter().filter_map(|rule| self.places.get(rule)).flatten().map(String::as_str).collect();
        let found = places.len();
        println!("{what}: {found} of at most {allowed} ({} sentences)", self.sentences);
        assert!(found <= allowed, "{what}: {found}, at most {allowed}\n{}", places.join("\n"));
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Tracked and new files of the repository that carry prose.
fn files() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git starts");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).expect("paths are UTF-8");
    let wanted = |path: &&str| {
        let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
        EXTENSIONS.contains(&extension) && !path.split('/').any(|part| SKIPPED.contains(&part))
    };
    let mut files: Vec<String> = listed.lines().filter(wanted).map(str::to_owned).collect();
    files.sort();
    files.dedup();
    files
}

#[test]
fn comments_and_docs_are_plain() {
    let rules = Rules::new();
    let (mut comments, mut docs) = (Report::default(), Report::default());
    for path in files() {
        // A file that was deleted but not committed yet is still listed.
        let Ok(text) = std::fs::read_to_string(root().join(&path)) else { continue };
        let report = if path.ends_with(".md") { &mut docs } else { &mut comments };
        report.read_prose(&rules, &path, &text);
        if path.ends_with(".rs") {
            report.read_code(&rules, &path, &text);
        }
    }
    let allowed = |report: &Report, per_1000: usize| report.sentences * per_1000 / 1000;
    let phrases: Vec<&str> = PHRASES.iter().map(|(name, _)| *name).collect();
    comments.check("phrases in comments", &phrases, allowed(&comments, PHRASES_PER_1000));
    docs.check("phrases in docs", &phrases, allowed(&docs, PHRASES_PER_1000));
    comments.check("long sentences in comments", &["long"], allowed(&comments, LONG_IN_COMMENTS_PER_1000));
    docs.check("long sentences in docs", &["long"], allowed(&docs, LONG_IN_DOCS_PER_1000));
    comments.check("wide lines", &["width"], 0);
    comments.check("long test names", &["test name"], 0);
}

/// Counts of the rules that a text breaks.
fn check(path: &str, text: &str, expected: &[(&str, usize)]) {
    let (rules, mut report) = (Rules::new(), Report::default());
    report.read_prose(&rules, path, text);
    if path.ends_with(".rs") {
        report.read_code(&rules, path, text);
    }
    for (rule, count) in expected {
        assert_eq!(report.count(rule), *count, "{rule} in {text:?}");
    }
    let named: usize = expected.iter().map(|(rule, _)| report.count(rule)).sum();
    let all: usize = report.places.values().map(Vec::len).sum();
    assert_eq!(named, all, "{text:?} breaks other rules: {:?}", report.places);
}

#[test]
fn phrases_are_found_in_comments() {
    check(
        "a.rs",
        "// Who has no time waits.\nfn f() {}\n",
        &[("starts with who", 1), ("no component named", 1)],
    );
    check("a.rs", "/// What a share may use at most.\n", &[("starts with what", 1)]);
    check("a.rs", "/// What happens if a share is idle?\n", &[]);
    check("a.rs", "//! Of a share that works alone NVML reports all.\n", &[("fronted phrase", 1)]);
    check("a.rs", "let a = 1; // nobody reads trailing comments\n", &[]);
    check("a.c", "/* It is to be done. */\n", &[("is to", 1)]);
    check("a.rs", "// A share waits\n// for so long as it must.\n", &[("quantity without a name", 1)]);
    check("driver/src/shares/scheduler/a.rs", "// Who has no time waits.\n", &[]);
}

#[test]
fn sentences_are_split_and_counted() {
    let long = "word ".repeat(SENTENCE_WORDS_MAX + 1);
    check("a.md", &long, &[("long", 1)]);
    check("a.md", &format!("{}. Next sentence starts here.", "word ".repeat(20).trim()), &[]);
    check("a.md", &format!("```\n{long}\n```\n| {long} |\n# {long}\n"), &[]);
    check("a.md", "- one item of a list\n- nobody reads this item\n", &[("no component named", 1)]);
    check("a.md", "See `nobody and somebody` for the names.\n", &[]);
}

#[test]
fn code_is_measured() {
    check("a.rs", &format!("fn {}() {{}}\n", "a".repeat(TEST_NAME_MAX + 1)), &[("test name", 1)]);
    check("a.rs", &format!("fn {}() {{}}\n", "a".repeat(TEST_NAME_MAX)), &[]);
    check("a.rs", &format!("let a = \"{}\";\n", "é".repeat(LINE_WIDTH_MAX)), &[("width", 1)]);
    check("a.rs", &format!("{}\n", "é".repeat(LINE_WIDTH_MAX)), &[]);
}
