//! The CEL functions `quantity()` and `isQuantity()`, and the methods of a quantity.

use ::cel::common::types::{CelBool, CelDouble, CelInt, CelString, INT_TYPE, STRING_TYPE, Type};
use ::cel::common::value::{CowVal, StaticVal, Val};
use ::cel::{DeclarationError, Env, ExecutionError};
use divvy_api::Quantity;
use std::any::Any;

static QUANTITY: Type = Type::new_unspecified_type("kubernetes.Quantity");

#[derive(Clone, Copy, Debug)]
pub(super) struct QuantityVal(pub(super) Quantity);

impl Val for QuantityVal {
    fn get_type(&self) -> &Type {
        &QUANTITY
    }

    fn cel_type() -> &'static Type {
        &QUANTITY
    }

    fn equals(&self, other: &dyn Val) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| other.0 == self.0)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(*self)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
impl StaticVal for QuantityVal {}

type Args<'b, 'v> = Vec<CowVal<'b, 'v>>;
type Answer<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

fn text<'a>(args: &'a Args<'_, '_>) -> Result<&'a str, ExecutionError> {
    let text = args.first().and_then(|arg| arg.downcast_ref::<CelString<'_>>());
    text.map(CelString::inner).ok_or(ExecutionError::MissingArgumentOrTarget)
}

/// An argument that is a quantity, or an integer that is converted to one.
fn amount(args: &Args<'_, '_>, at: usize) -> Result<Quantity, ExecutionError> {
    let arg = args.get(at).ok_or(ExecutionError::MissingArgumentOrTarget)?;
    let nano = |whole: &CelInt| i128::from(*whole.inner()) * 1_000_000_000;
    let whole = || {
        arg.downcast_ref::<CelInt>().map(|whole| Quantity::from_nano(nano(whole), Quantity::ZERO.format()))
    };
    let quantity = arg.downcast_ref::<QuantityVal>().map(|quantity| quantity.0);
    quantity.or_else(whole).ok_or(ExecutionError::MissingArgumentOrTarget)
}

fn out_of_range(function: &str) -> ExecutionError {
    ExecutionError::function_error(function, "the result is out of range")
}

fn parse<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    let quantity = text(&args)?.parse().map_err(|cause| ExecutionError::function_error("quantity", cause))?;
    Ok(CowVal::owned(QuantityVal(quantity)))
}

fn is_quantity<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(text(&args)?.parse::<Quantity>().is_ok())))
}

fn compare_to<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelInt::from(amount(&args, 0)?.cmp(&amount(&args, 1)?) as i64)))
}

fn is_greater_than<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(amount(&args, 0)? > amount(&args, 1)?)))
}

fn is_less_than<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(amount(&args, 0)? < amount(&args, 1)?)))
}

fn add<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    let sum = amount(&args, 0)?.checked_add(amount(&args, 1)?).ok_or_else(|| out_of_range("add"))?;
    Ok(CowVal::owned(QuantityVal(sum)))
}

fn sub<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    let difference = amount(&args, 0)?.checked_sub(amount(&args, 1)?).ok_or_else(|| out_of_range("sub"))?;
    Ok(CowVal::owned(QuantityVal(difference)))
}

fn sign<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelInt::from(amount(&args, 0)?.as_nano().signum() as i64)))
}

fn whole(quantity: Quantity) -> Option<i64> {
    quantity.is_whole().then(|| quantity.value()).flatten()
}

fn is_integer<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelBool::from(whole(amount(&args, 0)?).is_some())))
}

fn as_integer<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    let value = whole(amount(&args, 0)?);
    let value = value.ok_or_else(|| ExecutionError::function_error("asInteger", "not an integer"))?;
    Ok(CowVal::owned(CelInt::from(value)))
}

fn as_float<'b, 'v>(args: Args<'b, 'v>) -> Answer<'b, 'v> {
    Ok(CowVal::owned(CelDouble::from(amount(&args, 0)?.as_nano() as f64 / 1e9)))
}

pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_overload("quantity", "string_to_quantity", vec![STRING_TYPE], parse)?;
    env.add_overload("isQuantity", "is_quantity_string", vec![STRING_TYPE], is_quantity)?;
    let of = || QUANTITY.to_owned();
    env.add_member_overload("compareTo", "quantity_compare_to", of(), vec![of()], compare_to)?;
    env.add_member_overload("isGreaterThan", "quantity_is_greater_than", of(), vec![of()], is_greater_than)?;
    env.add_member_overload("isLessThan", "quantity_is_less_than", of(), vec![of()], is_less_than)?;
    env.add_member_overload("add", "quantity_add", of(), vec![of()], add)?;
    env.add_member_overload("add", "quantity_add_int", of(), vec![INT_TYPE], add)?;
    env.add_member_overload("sub", "quantity_sub", of(), vec![of()], sub)?;
    env.add_member_overload("sub", "quantity_sub_int", of(), vec![INT_TYPE], sub)?;
    env.add_member_overload("sign", "quantity_sign", of(), vec![], sign)?;
    env.add_member_overload("isInteger", "quantity_is_integer", of(), vec![], is_integer)?;
    env.add_member_overload("asInteger", "quantity_as_integer", of(), vec![], as_integer)?;
    env.add_member_overload("asApproximateFloat", "quantity_as_float", of(), vec![], as_float)?;
    Ok(())
}
