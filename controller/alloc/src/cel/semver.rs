//! The CEL functions `semver()` and `isSemver()`, and the methods of a version.

use ::cel::common::types::{BOOL_TYPE, CelBool, CelInt, CelString, STRING_TYPE, Type};
use ::cel::common::value::{CowVal, StaticVal, Val};
use ::cel::{DeclarationError, Env, ExecutionError};
use ::semver::Version;
use std::any::Any;
use std::cmp::Ordering;

static SEMVER: Type = Type::new_unspecified_type("kubernetes.Semver");

#[derive(Clone, Debug)]
pub(super) struct SemverVal(Version);

impl SemverVal {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        Version::parse(text).map(Self).map_err(|cause| format!("{text:?} is not a semantic version: {cause}"))
    }

    /// Build metadata does not affect the order.
    fn order(&self, other: &Self) -> Ordering {
        self.0.cmp_precedence(&other.0)
    }
}

impl Val for SemverVal {
    fn get_type(&self) -> &Type {
        &SEMVER
    }

    fn cel_type() -> &'static Type {
        &SEMVER
    }

    fn equals(&self, other: &dyn Val) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| self.order(other).is_eq())
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
impl StaticVal for SemverVal {}

/// Normalizes `v1.02` to `1.2.0`: no `v`, three numbers, no leading zeros.
fn normalize(text: &str) -> String {
    let text = text.strip_prefix('v').unwrap_or(text);
    let end = text.find(['-', '+']).unwrap_or(text.len());
    let (numbers, rest) = text.split_at(end);
    let strip = |number: &str| match number.trim_start_matches('0') {
        "" if !number.is_empty() => "0".to_owned(),
        stripped => stripped.to_owned(),
    };
    let mut numbers: Vec<_> = numbers.split('.').map(strip).collect();
    while numbers.len() < 3 {
        numbers.push("0".to_owned());
    }
    format!("{}{rest}", numbers.join("."))
}

type Args<'b, 'v> = Vec<CowVal<'b, 'v>>;
type Answer<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

fn read(args: &Args<'_, '_>) -> Result<Result<SemverVal, String>, ExecutionError> {
    let text = args.first().and_then(|arg| arg.downcast_ref::<CelString<'_>>());
    let text = text.map(CelString::inner).ok_or(ExecutionError::MissingArgumentOrTarget)?;
    let normal = args.get(1).and_then(|arg| arg.downcast_ref::<CelBool>()).is_some_and(|arg| *arg.inner());
    Ok(if normal { SemverVal::parse(&normalize(text)) } else { SemverVal::parse(text) })
}

fn parse<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    let version = read(&args)?.map_err(|cause| ExecutionError::function_error("semver", cause))?;
    Ok(CowVal::owned(version))
}

fn is_semver<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(read(&args)?.is_ok())))
}

fn version<'a>(args: &'a Args<'_, '_>, at: usize) -> Result<&'a SemverVal, ExecutionError> {
    args.get(at)
        .and_then(|arg| arg.downcast_ref::<SemverVal>())
        .ok_or(ExecutionError::MissingArgumentOrTarget)
}

fn compare_to<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelInt::from(version(&args, 0)?.order(version(&args, 1)?) as i64)))
}

fn is_greater_than<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(version(&args, 0)?.order(version(&args, 1)?).is_gt())))
}

fn is_less_than<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(version(&args, 0)?.order(version(&args, 1)?).is_lt())))
}

fn number<'b, 'v>(number: u64) -> Answer<'b, 'v> {
    let number = i64::try_from(number).map_err(|cause| ExecutionError::function_error("semver", cause))?;
    Ok(CowVal::owned(CelInt::from(number)))
}

fn major<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    number(version(&args, 0)?.0.major)
}

fn minor<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    number(version(&args, 0)?.0.minor)
}

fn patch<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    number(version(&args, 0)?.0.patch)
}

pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_overload("semver", "string_to_semver", vec![STRING_TYPE], parse)?;
    env.add_overload("semver", "string_bool_to_semver", vec![STRING_TYPE, BOOL_TYPE], parse)?;
    env.add_overload("isSemver", "is_semver_string", vec![STRING_TYPE], is_semver)?;
    env.add_overload("isSemver", "is_semver_string_bool", vec![STRING_TYPE, BOOL_TYPE], is_semver)?;
    let of = || SEMVER.to_owned();
    env.add_member_overload("compareTo", "semver_compare_to", of(), vec![of()], compare_to)?;
    env.add_member_overload("isGreaterThan", "semver_is_greater_than", of(), vec![of()], is_greater_than)?;
    env.add_member_overload("isLessThan", "semver_is_less_than", of(), vec![of()], is_less_than)?;
    env.add_member_overload("major", "semver_major", of(), vec![], major)?;
    env.add_member_overload("minor", "semver_minor", of(), vec![], minor)?;
    env.add_member_overload("patch", "semver_patch", of(), vec![], patch)?;
    Ok(())
}
