//! CEL selectors in the environment of the Kubernetes API server.
//!
//! Supported: `device.driver`, `device.attributes[domain].name`, `device.capacity[domain].name`,
//! `device.allowMultipleAllocations`, `quantity()`, `semver()`, `cel.bind`, optionals, strings and
//! lists. An unknown domain is an empty map and an unknown name is an error. As in the scheduler,
//! an error on any evaluated device ends the allocation.

mod device;
mod quantity;
mod semver;
pub(crate) mod types;

use ::cel::common::ast::{ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue};
use ::cel::parser::{Macro, MacroExprHelper, ParseError};
use ::cel::{Context, DeclarationError, Env, Program, Value, extensions};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};
use std::fmt;
use std::sync::{Arc, LazyLock};

/// The API server's limit of an expression.
const EXPRESSION_MAX_BYTES: usize = 10 * 1024;

static ENV: LazyLock<Arc<Env>> =
    LazyLock::new(|| Arc::new(environment().expect("every declaration is made once")));

fn environment() -> Result<Env, DeclarationError> {
    let mut env = Env::stdlib();
    env.add_extension(extensions::strings)?;
    env.add_extension(extensions::lists)?;
    env.add_macro(Macro::receiver("bind", 3, bind))?;
    quantity::declare(&mut env)?;
    semver::declare(&mut env)?;
    Ok(env)
}

/// The macro `cel.bind(name, value, expression)`. As in cel-go, it expands to a loop over an empty
/// list, with the name as accumulator.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Result<Option<IdedExpr>, ParseError> {
    let is_cel =
        target.as_ref().is_some_and(|target| matches!(&target.expr, Expr::Ident(name) if name == "cel"));
    let [name, _, _] = args.as_slice() else {
        return Ok(None);
    };
    let Expr::Ident(name) = name.expr.clone() else {
        return Err(helper.new_error(name.id, "cel.bind needs a plain name"));
    };
    if !is_cel {
        return Ok(None);
    }
    let (Some(result), Some(accu_init)) = (args.pop(), args.pop()) else {
        return Ok(None);
    };
    target.take();
    let bound = ComprehensionExpr {
        iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_var: name.clone(),
        accu_init,
        loop_cond: helper.next_expr(Expr::Literal(LiteralValue::Boolean(false.into()))),
        loop_step: helper.next_expr(Expr::Ident(name)),
        result,
    };
    Ok(Some(helper.next_expr(Expr::Comprehension(Box::new(bound)))))
}

/// A compiled selector.
pub(crate) struct Selector<'a> {
    text: &'a str,
    program: Program,
}

impl<'a> Selector<'a> {
    pub(crate) fn compile(text: &'a str) -> Result<Self, String> {
        if text.len() > EXPRESSION_MAX_BYTES {
            return Err(format!("a CEL expression is longer than {EXPRESSION_MAX_BYTES} bytes"));
        }
        let program = ENV.compile(text).map_err(|cause| format!("CEL expression {text:?}: {cause}"))?;
        Ok(Self { text, program })
    }

    /// Whether the driver's device is selected. As in the scheduler, an attribute of an unknown type
    /// is an error even if the expression does not name it.
    pub(crate) fn matches(&self, driver: &str, device: &Device) -> Result<bool, String> {
        let unknown =
            |(_, attribute): &(&String, &DeviceAttribute)| **attribute == DeviceAttribute::default();
        if let Some((name, _)) = device.attributes.iter().flatten().find(unknown) {
            return Err(format!("attribute {name} has a value of unknown type"));
        }
        let mut context = Context::with_env(Arc::clone(&ENV));
        context.add_variable_as_val("device", Box::new(device::DeviceVal::new(driver, device)));
        match self.program.execute(&context) {
            Ok(Value::Bool(matches)) => Ok(matches),
            Ok(other) => Err(format!("{:?} returns a {}, not true or false", self.text, other.type_of())),
            Err(cause) => Err(format!("{:?}: {cause}", self.text)),
        }
    }
}

impl fmt::Debug for Selector<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}", self.text)
    }
}

#[cfg(test)]
mod tests;
