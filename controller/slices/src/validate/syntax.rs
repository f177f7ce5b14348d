//! The grammars of names and values, as the API defines them.

use super::{ATTRIBUTE_TEXT, Broken};

fn check(holds: bool, what: &'static str, text: &str, wanted: &'static str) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken::Syntax { what, text: text.to_owned(), wanted }) }
}

/// DNS label: `gpu-0`.
pub(crate) fn label(what: &'static str, text: &str) -> Result<(), Broken> {
    check(is_label(text), what, text, "a DNS label of at most 63 lower-case letters, digits and '-'")
}

fn is_label(text: &str) -> bool {
    is_label_of_bytes(text.as_bytes())
}

fn is_label_of_bytes(bytes: &[u8]) -> bool {
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    bytes.len() <= 63
        && bytes.first().is_some_and(edge)
        && bytes.last().is_some_and(edge)
        && bytes.iter().all(|b| edge(b) || *b == b'-')
}

/// DNS subdomain: labels joined by dots.
fn is_subdomain(text: &str, most: usize) -> bool {
    text.len() <= most && text.as_bytes().split(|b| *b == b'.').all(is_label_of_bytes)
}

/// Name of an attribute or a capacity: `[domain/]identifier`.
pub(crate) fn qualified(what: &'static str, text: &str) -> Result<(), Broken> {
    let (domain, id) = split_domain(text);
    let bytes = id.as_bytes();
    let identifier = id.len() <= 32
        && bytes.first().is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_')
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let holds = identifier && domain.is_none_or(|domain| is_subdomain(domain, 63));
    check(holds, what, text, "a C identifier of at most 32 characters, with or without a domain")
}

/// At the first slash. (A byte loop: the texts are short and many.)
fn split_domain(text: &str) -> (Option<&str>, &str) {
    match text.bytes().position(|b| b == b'/') {
        Some(at) => (Some(&text[..at]), &text[at + 1..]),
        None => (None, text),
    }
}

/// Key of a taint: `[domain/]name`.
pub(crate) fn label_key(what: &'static str, text: &str) -> Result<(), Broken> {
    let (domain, name) = split_domain(text);
    let holds =
        !name.is_empty() && is_label_value(name) && domain.is_none_or(|domain| is_subdomain(domain, 253));
    check(holds, what, text, "a label key")
}

/// Value of a taint.
pub(crate) fn label_value(what: &'static str, text: &str) -> Result<(), Broken> {
    check(is_label_value(text), what, text, "a label value")
}

fn is_label_value(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |b: &u8| b.is_ascii_alphanumeric();
    bytes.len() <= 63
        && bytes.first().is_none_or(edge)
        && bytes.last().is_none_or(edge)
        && bytes.iter().all(|b| edge(b) || matches!(b, b'-' | b'_' | b'.'))
}

/// A text attribute.
pub(crate) fn attribute_text(text: &str) -> Result<(), Broken> {
    check(text.len() <= ATTRIBUTE_TEXT, "attribute", text, "at most 64 bytes long")
}

/// A semantic version 2.0.0.
pub(crate) fn version(text: &str) -> Result<(), Broken> {
    check(
        text.len() <= ATTRIBUTE_TEXT && is_semver(text),
        "attribute",
        text,
        "a semantic version of at most 64 bytes",
    )
}

fn is_semver(text: &str) -> bool {
    let bytes = text.as_bytes();
    let (rest, build) = split_at(bytes, b'+');
    let (core, pre) = split_at(rest, b'-');
    let digits = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    let number = |part: &[u8]| digits(part) && (part == b"0" || part[0] != b'0');
    let word = |part: &[u8]| !part.is_empty() && part.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-');
    let dots = |b: &u8| *b == b'.';
    core.split(dots).count() == 3
        && core.split(dots).all(number)
        && pre.is_none_or(|pre| pre.split(dots).all(|part| word(part) && (!digits(part) || number(part))))
        && build.is_none_or(|build| build.split(dots).all(word))
}

/// What stands before and behind the first of a byte.
fn split_at(bytes: &[u8], separator: u8) -> (&[u8], Option<&[u8]>) {
    match bytes.iter().position(|b| *b == separator) {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    }
}
