//! The CEL expressions of an allocation. Each is compiled once, and evaluated once per device.

use crate::cel::Selector;
use crate::pool::Candidate;
use std::collections::BTreeMap;

/// Expressions by index, compiled when they are first evaluated.
#[derive(Debug, Default)]
pub(crate) struct Selectors<'a> {
    by_text: BTreeMap<&'a str, usize>,
    texts: Vec<&'a str>,
}

/// The outcomes of expressions, by expression and device.
pub(crate) struct Matches<'s, 'a> {
    selectors: &'s Selectors<'a>,
    compiled: Vec<Option<Result<Selector<'a>, String>>>,
    outcomes: Vec<Vec<Option<Result<bool, MatchError>>>>,
}

/// Why an expression has no outcome.
#[derive(Clone, Debug)]
pub(crate) enum MatchError {
    Compile(String),
    Evaluate(String),
}

impl<'a> Selectors<'a> {
    /// The index of an expression.
    pub(crate) fn add(&mut self, text: &'a str) -> usize {
        *self.by_text.entry(text).or_insert_with(|| {
            self.texts.push(text);
            self.texts.len() - 1
        })
    }
}

impl<'s, 'a> Matches<'s, 'a> {
    pub(crate) fn new(selectors: &'s Selectors<'a>, devices: usize) -> Self {
        let count = selectors.texts.len();
        Self {
            selectors,
            compiled: (0..count).map(|_| None).collect(),
            outcomes: vec![vec![None; devices]; count],
        }
    }

    /// Whether an expression was evaluated on a device before.
    pub(crate) fn is_known(&self, selector: usize, device: usize) -> bool {
        self.outcomes[selector][device].is_some()
    }

    /// Whether an expression selects a device.
    pub(crate) fn matches(
        &mut self,
        selector: usize,
        device: usize,
        candidate: &Candidate<'_>,
    ) -> Result<bool, MatchError> {
        if let Some(known) = &self.outcomes[selector][device] {
            return known.clone();
        }
        let text = self.selectors.texts[selector];
        let compiled = self.compiled[selector].get_or_insert_with(|| Selector::compile(text));
        let outcome = match compiled {
            Ok(compiled) => {
                compiled.matches(candidate.key.driver, candidate.wire).map_err(MatchError::Evaluate)
            }
            Err(cause) => Err(MatchError::Compile(cause.clone())),
        };
        self.outcomes[selector][device] = Some(outcome.clone());
        outcome
    }
}
