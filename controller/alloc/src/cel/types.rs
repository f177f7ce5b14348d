//! Types of selectors, before a device is known. The API server compiles attributes as `dyn`, so a
//! comparison of different types fails only when the scheduler evaluates it, and no pod is placed.
//!
//! A value of unknown type causes no problem. After a problem, the value counts as unknown, so that
//! one mistake has one message.

use super::{ENV, EXPRESSION_MAX_BYTES};
use crate::stack::on_large_stack;
use ::cel::Program;
use ::cel::common::ast::{CallExpr, ComprehensionExpr, Expr, IdedExpr, LiteralValue, SelectExpr, operators};
use divvy_api::Quantity;
use divvy_api::check::Severity;
use divvy_api::check::published::{self, Published, SelectorProblem, ValueType, nearest};
use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The problems of a selector for devices of these modes; empty `modes` are all modes. `profiles`
/// are the known MIG profiles; empty if unknown.
pub fn check_selector(
    expression: &str,
    modes: &BTreeSet<Mode>,
    profiles: &BTreeSet<String>,
) -> Vec<SelectorProblem> {
    on_large_stack(|| check(expression, modes, profiles)).unwrap_or_default()
}

fn check(expression: &str, modes: &BTreeSet<Mode>, profiles: &BTreeSet<String>) -> Vec<SelectorProblem> {
    let failed = |message: String| vec![SelectorProblem { severity: Severity::Error, message }];
    if expression.len() > EXPRESSION_MAX_BYTES {
        return failed(format!(
            "CEL: the expression is longer than {EXPRESSION_MAX_BYTES} bytes; shorten it"
        ));
    }
    let program = match ENV.compile(expression) {
        Ok(program) => program,
        Err(errors) => {
            let Some(first) = errors.errors.first() else { return failed(format!("CEL: {errors}")) };
            let (line, column) = first.pos;
            let open = ['"', '\''].iter().any(|quote| expression.matches(*quote).count() % 2 == 1);
            let cause = first.msg.trim().replace('\n', " ");
            let remedy = match (open, cause.contains("'= ") || cause.contains("'='")) {
                (true, _) => "close the quotation mark",
                (false, true) => "write == to compare",
                (false, false) => "correct the expression",
            };
            return failed(format!("CEL at {line}:{column}: {cause}; {remedy}"));
        }
    };
    let mut checker =
        Checker { program: &program, modes, profiles, variables: BTreeMap::new(), problems: Vec::new() };
    let root = program.expression();
    let type_ = checker.infer(root);
    if !matches!(type_, Type::Bool | Type::Unknown) {
        checker.report(
            root,
            Severity::Error,
            format!("the result is {type_}, not true or false; compare it"),
        );
    }
    checker.problems
}

/// The type of an expression.
#[derive(Clone, Debug, PartialEq)]
enum Type {
    Unknown,
    Bool,
    Number,
    Text,
    Bytes,
    Null,
    Quantity,
    Version,
    List(Box<Type>),
    Map,
    Device,
    /// `device.attributes` or `device.capacity`.
    Domains {
        capacity: bool,
    },
    /// The values of a domain.
    Values(&'static [Published]),
}

impl fmt::Display for Type {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Unknown => "a value",
            Self::Bool => "true or false",
            Self::Number => "a number",
            Self::Text => "a text",
            Self::Bytes => "bytes",
            Self::Null => "null",
            Self::Quantity => "a quantity",
            Self::Version => "a version",
            Self::List(_) => "a list",
            Self::Map | Self::Domains { .. } | Self::Values(_) => "a map",
            Self::Device => "a device",
        })
    }
}

struct Checker<'a> {
    program: &'a Program,
    modes: &'a BTreeSet<Mode>,
    profiles: &'a BTreeSet<String>,
    /// Variables of macros.
    variables: BTreeMap<String, Type>,
    problems: Vec<SelectorProblem>,
}

/// Types, and the first parts of the names of functions.
const NAMES: [&str; 18] = [
    "int",
    "uint",
    "double",
    "bool",
    "string",
    "bytes",
    "list",
    "map",
    "null_type",
    "type",
    "dyn",
    "cel",
    "optional",
    "math",
    "sets",
    "strings",
    "lists",
    "google",
];

/// Functions and methods of the API server's environment. Sources: cel-go `common/stdlib` and
/// `ext`, Kubernetes `apiserver/pkg/cel/library`.
const FUNCTIONS: &str = "size startsWith endsWith contains matches int uint double string bool bytes type \
    dyn duration timestamp getFullYear getMonth getDate getDayOfMonth getDayOfWeek getDayOfYear getHours \
    getMinutes getSeconds getMilliseconds quantity isQuantity sign asInteger asApproximateFloat isInteger \
    add sub compareTo isGreaterThan isLessThan semver isSemver major minor patch of none ofNonZeroValue \
    optional orValue or hasValue value optMap optFlatMap lowerAscii upperAscii replace split join substring \
    trim charAt indexOf lastIndexOf format reverse quote strings find findAll isSorted sum min max slice \
    sort sortBy flatten distinct first last range lists bind includes greatest least ceil floor round trunc \
    abs isInf isNaN isFinite url isURL getScheme getHost getHostname getPort getEscapedPath getQuery ip isIP \
    cidr isCIDR containsIP containsCIDR intersects equivalent optional.of optional.none \
    optional.ofNonZeroValue";

impl Checker<'_> {
    /// The position of an expression, `line:column`, from 1.
    fn position(&self, at: &IdedExpr) -> String {
        let info = self.program.source_info();
        let start = info.offset_for(at.id).map_or(0, |(start, _)| start as usize);
        let before = info.source.get(..start).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        format!("{line}:{column}")
    }

    fn report(&mut self, at: &IdedExpr, severity: Severity, message: String) {
        let message = format!("CEL at {}: {message}", self.position(at));
        self.problems.push(SelectorProblem { severity, message });
    }

    fn wrong(&mut self, at: &IdedExpr, message: String) -> Type {
        self.report(at, Severity::Error, message);
        Type::Unknown
    }

    fn infer(&mut self, at: &IdedExpr) -> Type {
        match &at.expr {
            Expr::Unspecified | Expr::Struct(_) => Type::Unknown,
            Expr::Literal(literal) => match literal {
                LiteralValue::Boolean(_) => Type::Bool,
                LiteralValue::Bytes(_) => Type::Bytes,
                LiteralValue::Double(_) | LiteralValue::Int(_) | LiteralValue::UInt(_) => Type::Number,
                LiteralValue::Null => Type::Null,
                LiteralValue::String(_) => Type::Text,
            },
            Expr::Ident(name) => match self.variables.get(name) {
                Some(type_) => type_.clone(),
                None if name == "device" => Type::Device,
                None if NAMES.contains(&name.as_str()) || name.starts_with(['@', '#']) => Type::Unknown,
                None => {
                    let remedy = match nearest(name, ["device"]) {
                        Some(near) => format!("did you mean {near}?"),
                        None => "write a text in quotes".to_owned(),
                    };
                    self.wrong(at, format!("the name {name} is not declared; {remedy}"))
                }
            },
            Expr::List(list) => {
                let mut types: Vec<_> = list.elements.iter().map(|element| self.infer(element)).collect();
                types.dedup();
                let only = if types.len() == 1 { types.pop() } else { None };
                Type::List(Box::new(only.unwrap_or(Type::Unknown)))
            }
            Expr::Map(_) => Type::Map,
            Expr::Select(select) => self.select(at, select),
            Expr::Call(call) => self.call(at, call),
            Expr::Comprehension(loop_) => self.comprehension(loop_),
        }
    }

    fn select(&mut self, at: &IdedExpr, SelectExpr { operand, field, test }: &SelectExpr) -> Type {
        let of = self.infer(operand);
        let type_ = self.member(at, of, field);
        if *test { Type::Bool } else { type_ }
    }

    /// The member of a value, by field or index.
    fn member(&mut self, at: &IdedExpr, of: Type, name: &str) -> Type {
        match of {
            Type::Device => match name {
                "driver" => Type::Text,
                "allowMultipleAllocations" => Type::Bool,
                "attributes" => Type::Domains { capacity: false },
                "capacity" => Type::Domains { capacity: true },
                _ => {
                    let fields = ["driver", "attributes", "capacity", "allowMultipleAllocations"];
                    let remedy = match nearest(name, fields) {
                        Some(near) => format!("did you mean {near}?"),
                        None => format!("use {}", fields.join(", ")),
                    };
                    self.wrong(at, format!("a device has no field {name}; {remedy}"))
                }
            },
            Type::Domains { capacity } => match (published::attributes_of(name), capacity) {
                (Some(_), true) if name == DRIVER => Type::Values(published::CAPACITIES),
                (Some(table), false) => Type::Values(table),
                _ => self.unknown_domain(at, name, capacity),
            },
            Type::Values(table) => match published::find(table, name, self.modes) {
                Ok(found) => match found.type_ {
                    ValueType::Text => Type::Text,
                    ValueType::Number => Type::Number,
                    ValueType::Version => Type::Version,
                    ValueType::Quantity => Type::Quantity,
                },
                Err(message) => self.wrong(at, message),
            },
            _ => Type::Unknown,
        }
    }

    fn unknown_domain(&mut self, at: &IdedExpr, name: &str, capacity: bool) -> Type {
        let field = if capacity { "capacity" } else { "attributes" };
        let (table, known) = match capacity {
            true => (published::CAPACITIES, &[DRIVER] as &[&str]),
            false => (published::ATTRIBUTES, &[DRIVER, published::STANDARD_DOMAIN] as &[&str]),
        };
        if table.iter().any(|one| one.name == name) {
            let remedy = format!("write device.{field}[\"{DRIVER}\"].{name}");
            return self.wrong(at, format!("{name} needs the domain of the driver; {remedy}"));
        }
        let alike = |known: &&&str| strsim_alike(name, known);
        match known.iter().find(alike) {
            Some(near) => {
                self.wrong(at, format!("no device has {field} in the domain {name}; did you mean {near}?"))
            }
            None if name == "gpu.nvidia.com" => {
                let message =
                    format!("no device has {field} in {name}, the domain of NVIDIA's driver; write {DRIVER}");
                self.wrong(at, message)
            }
            None => Type::Unknown,
        }
    }

    fn call(&mut self, at: &IdedExpr, call: &CallExpr) -> Type {
        let CallExpr { func_name, target, args } = call;
        match (func_name.as_str(), args.as_slice()) {
            (operators::INDEX, [of, index]) => {
                let of = self.infer(of);
                match literal_text(index) {
                    Some(name) => self.member(index, of, name),
                    None => {
                        self.infer(index);
                        Type::Unknown
                    }
                }
            }
            (operators::LOGICAL_AND | operators::LOGICAL_OR | operators::LOGICAL_NOT, args) => {
                for arg in args {
                    let type_ = self.infer(arg);
                    if !matches!(type_, Type::Bool | Type::Unknown) {
                        self.wrong(arg, format!("this is {type_}, not true or false; compare it"));
                    }
                }
                Type::Bool
            }
            (operators::CONDITIONAL, [condition, yes, no]) => {
                self.infer(condition);
                let (yes, no) = (self.infer(yes), self.infer(no));
                if yes == no { yes } else { Type::Unknown }
            }
            (operators::EQUALS | operators::NOT_EQUALS, [left, right]) => {
                self.compare(at, left, right, true);
                Type::Bool
            }
            (
                operators::LESS | operators::LESS_EQUALS | operators::GREATER | operators::GREATER_EQUALS,
                [left, right],
            ) => {
                self.compare(at, left, right, false);
                Type::Bool
            }
            (operators::IN, [left, right]) => {
                let (element, list) = (self.infer(left), self.infer(right));
                if let Type::List(of) = &list {
                    self.equal(at, left, element, right, *of.clone());
                }
                if let Expr::List(list) = &right.expr {
                    list.elements.iter().for_each(|one| self.values(left, one));
                }
                Type::Bool
            }
            (operators::ADD | operators::SUBSTRACT, [left, right]) => {
                let (left, right) = (self.infer(left), self.infer(right));
                if left == Type::Quantity || right == Type::Quantity {
                    let remedy = "use add or sub of the quantity";
                    return self.wrong(at, format!("quantities cannot be added by an operator; {remedy}"));
                }
                if left == right { left } else { Type::Unknown }
            }
            ("quantity" | "semver", [arg]) if target.is_none() => self.parsed(arg, func_name),
            (name, args) => {
                let of = target.as_ref().map(|target| self.infer(target));
                let args: Vec<_> = args.iter().map(|arg| (arg, self.infer(arg))).collect();
                self.function(at, name, of, &args)
            }
        }
    }

    /// `quantity("...")` or `semver("...")`.
    fn parsed(&mut self, arg: &IdedExpr, function: &str) -> Type {
        let type_ = self.infer(arg);
        if !matches!(type_, Type::Text | Type::Unknown) {
            return self.wrong(arg, format!("{function} needs a text, not {type_}; write it in quotes"));
        }
        match (function, literal_text(arg)) {
            ("quantity", Some(text)) => {
                if let Err(cause) = text.parse::<Quantity>() {
                    return self.wrong(arg, cause.to_string());
                }
                Type::Quantity
            }
            ("quantity", None) => Type::Quantity,
            (_, Some(text)) if semver::Version::parse(text).is_err() => self.wrong(
                arg,
                format!("{text:?} is not a semantic version; write three numbers, such as 580.65.6"),
            ),
            _ => Type::Version,
        }
    }

    fn function(&mut self, at: &IdedExpr, name: &str, of: Option<Type>, args: &[(&IdedExpr, Type)]) -> Type {
        let is_operator = name.starts_with(['_', '@', '!', '-']);
        let mut known = FUNCTIONS.split_whitespace();
        if !is_operator && !known.any(|known| known == name) {
            let remedy = match nearest(name, FUNCTIONS.split_whitespace()) {
                Some(near) => format!("did you mean {near}?"),
                None => "correct the expression".to_owned(),
            };
            return self.wrong(at, format!("there is no function {name}; {remedy}"));
        }
        let of = of.unwrap_or(Type::Unknown);
        match name {
            "compareTo" | "isGreaterThan" | "isLessThan" => {
                let result = if name == "compareTo" { Type::Number } else { Type::Bool };
                let Some((arg, type_)) = args.first() else { return result };
                match (&of, type_) {
                    (_, Type::Unknown) | (Type::Unknown, _) => {}
                    (Type::Quantity, Type::Quantity) | (Type::Version, Type::Version) => {}
                    (Type::Quantity, Type::Text) => {
                        let remedy = format!("write quantity({})", shown(arg));
                        self.wrong(
                            arg,
                            format!("{name} of a quantity needs a quantity, not a text; {remedy}"),
                        );
                    }
                    (Type::Version, Type::Text) => {
                        let remedy = format!("write semver({})", shown_version(arg));
                        self.wrong(arg, format!("{name} of a version needs a version, not a text; {remedy}"));
                    }
                    (Type::Quantity, Type::Number) if name == "compareTo" => {
                        let remedy = "write quantity(\"...\")";
                        self.wrong(arg, format!("{name} of a quantity needs a quantity; {remedy}"));
                    }
                    (Type::Quantity | Type::Version, other) => {
                        self.wrong(arg, format!("{name} of {of} needs {of}, not {other}; convert it"));
                    }
                    (other, _) => {
                        let remedy = "compare with an operator such as >=";
                        self.wrong(at, format!("{other} has no method {name}; {remedy}"));
                    }
                }
                result
            }
            "startsWith" | "endsWith" | "contains" | "matches" => {
                if let Some((arg, type_)) = args.first()
                    && of == Type::Text
                    && !matches!(type_, Type::Text | Type::Unknown)
                {
                    self.wrong(arg, format!("{name} needs a text, not {type_}; write it in quotes"));
                } else if matches!(of, Type::Number | Type::Quantity | Type::Version | Type::Bool) {
                    let remedy = match of {
                        Type::Quantity | Type::Version => "use compareTo",
                        _ => "compare with an operator such as ==",
                    };
                    self.wrong(at, format!("{of} has no method {name}; {remedy}"));
                }
                Type::Bool
            }
            "lowerAscii" | "upperAscii" | "replace" | "trim" | "substring" | "string" => Type::Text,
            "size" | "int" | "double" | "major" | "minor" | "patch" | "asInteger" | "sign" | "indexOf" => {
                Type::Number
            }
            "add" | "sub" if of == Type::Quantity => Type::Quantity,
            "isQuantity" | "isSemver" | "hasValue" | "isInteger" | "isSorted" => Type::Bool,
            _ => Type::Unknown,
        }
    }

    fn compare(&mut self, at: &IdedExpr, left: &IdedExpr, right: &IdedExpr, equality: bool) {
        let (first, second) = (self.infer(left), self.infer(right));
        let ordered = matches!(first, Type::Quantity | Type::Version) && first == second;
        if !equality && ordered {
            let function = "use compareTo, such as a.compareTo(b) >= 0";
            let plural = if first == Type::Quantity { "quantities" } else { "versions" };
            self.wrong(at, format!("operators cannot order {plural}; {function}"));
            return;
        }
        self.equal(at, left, first, right, second);
        if equality {
            self.values(left, right);
            self.values(right, left);
        }
    }

    /// Reports values of different types.
    fn equal(&mut self, at: &IdedExpr, left: &IdedExpr, first: Type, right: &IdedExpr, second: Type) {
        if first == second || [&first, &second].iter().any(|one| matches!(one, Type::Unknown | Type::Null)) {
            return;
        }
        let remedy = match (&first, &second) {
            (Type::Quantity, Type::Text) => format!("write compareTo(quantity({}))", shown(right)),
            (Type::Text, Type::Quantity) => format!("write compareTo(quantity({}))", shown(left)),
            (Type::Quantity, Type::Number) | (Type::Number, Type::Quantity) => {
                "write compareTo(quantity(\"10Gi\"))".to_owned()
            }
            (Type::Version, _) => format!("write compareTo(semver({}))", shown_version(right)),
            (_, Type::Version) => format!("write compareTo(semver({}))", shown_version(left)),
            (Type::Number, Type::Text) => match literal_text(right).and_then(|text| text.parse::<i64>().ok())
            {
                Some(number) => format!("write {number} without quotes"),
                None => "compare with a number".to_owned(),
            },
            (Type::Text, Type::Number | Type::Bool) => "write the value in quotes".to_owned(),
            _ => "compare values of one type".to_owned(),
        };
        let other = match subject(right) {
            Some(name) => format!("{name}, {second}"),
            None => second.to_string(),
        };
        let message = match subject(left) {
            Some(name) => format!("{name} is {first} and cannot be compared with {other}"),
            None => format!("{first} cannot be compared with {other}"),
        };
        self.wrong(at, format!("{message}; {remedy}"));
    }

    /// Warns of a text that an attribute never has.
    fn values(&mut self, attribute: &IdedExpr, literal: &IdedExpr) {
        let (Some(name), Some(text)) = (attribute_name(attribute), literal_text(literal)) else { return };
        let Some(found) = published::ATTRIBUTES.iter().find(|one| one.name == name) else { return };
        let known: Vec<&str> = match name {
            "profile" => self.profiles.iter().map(String::as_str).collect(),
            _ => found.values.to_vec(),
        };
        if known.is_empty() || known.contains(&text) {
            return;
        }
        let remedy = match nearest(text, known.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None if name == "profile" => "compare with `divvy template --gpus MODEL`".to_owned(),
            None => format!("use one of {}", known.join(", ")),
        };
        let message = format!("no known device has the {name} {text:?}; {remedy}");
        self.report(literal, Severity::Warning, message);
    }

    fn comprehension(&mut self, loop_: &ComprehensionExpr) -> Type {
        let range = self.infer(&loop_.iter_range);
        let accumulated = self.infer(&loop_.accu_init);
        let is_bind = matches!(&loop_.iter_range.expr, Expr::List(list) if list.elements.is_empty());
        let element = match range {
            Type::List(of) => *of,
            _ => Type::Unknown,
        };
        let outer = self.variables.clone();
        self.variables.insert(loop_.iter_var.clone(), element);
        self.variables.extend(loop_.iter_var2.clone().map(|name| (name, Type::Unknown)));
        let accumulated = if is_bind || accumulated == Type::Bool { accumulated } else { Type::Unknown };
        self.variables.insert(loop_.accu_var.clone(), accumulated);
        if !is_bind {
            self.infer(&loop_.loop_step);
        }
        let result = self.infer(&loop_.result);
        self.variables = outer;
        if is_bind || result == Type::Bool { result } else { Type::Unknown }
    }
}

fn strsim_alike(name: &str, known: &str) -> bool {
    nearest(name, [known]).is_some() && name.ends_with(".dev") == known.ends_with(".dev")
}

fn literal_text(at: &IdedExpr) -> Option<&str> {
    match &at.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

/// A literal as written, for a remedy.
fn shown(at: &IdedExpr) -> String {
    literal_text(at).map_or_else(|| "...".to_owned(), |text| format!("{text:?}"))
}

/// A version with three numbers, for a remedy.
fn shown_version(at: &IdedExpr) -> String {
    let Some(text) = literal_text(at) else { return "...".to_owned() };
    let missing = 3_usize.saturating_sub(text.split('.').count());
    format!("{:?}", text.to_owned() + &".0".repeat(missing))
}

/// The name of an attribute or capacity of a device, if the expression is one.
fn subject(at: &IdedExpr) -> Option<String> {
    match &at.expr {
        Expr::Select(select) => Some(select.field.clone()),
        Expr::Call(call) if call.func_name == operators::INDEX => {
            call.args.get(1).and_then(literal_text).map(str::to_owned)
        }
        _ => None,
    }
}

/// The name of an attribute in our domain, if the expression is one.
fn attribute_name(at: &IdedExpr) -> Option<&str> {
    let (of, name) = match &at.expr {
        Expr::Select(select) if !select.test => (select.operand.as_ref(), select.field.as_str()),
        Expr::Call(call) if call.func_name == operators::INDEX => {
            (call.args.first()?, literal_text(call.args.get(1)?)?)
        }
        _ => return None,
    };
    let Expr::Call(call) = &of.expr else { return None };
    let domain = (call.func_name == operators::INDEX).then(|| literal_text(call.args.get(1)?)).flatten()?;
    let Expr::Select(select) = &call.args.first()?.expr else { return None };
    (domain == DRIVER && select.field == "attributes").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "device.attributes[\"gpu.divvy.dev\"]";
    const C: &str = "device.capacity[\"gpu.divvy.dev\"]";

    /// The problems of an expression in which `A` and `C` are attributes and capacities.
    fn check(modes: &[Mode], text: &str, expected: &[&str]) {
        let text = text.replace("A.", &format!("{A}.")).replace("C.", &format!("{C}."));
        let profiles = ["1g.10gb", "3g.40gb"].map(str::to_owned).into();
        let found = check_selector(&text, &modes.iter().copied().collect(), &profiles);
        let found: Vec<_> = found.into_iter().map(|problem| problem.message).collect();
        assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
        for (found, part) in found.iter().zip(expected) {
            assert!(found.contains(part), "{text}: {found}");
        }
    }

    #[test]
    fn valid_selectors_have_no_problem() {
        for text in [
            "device.driver == 'gpu.divvy.dev' && A.type == 'gpu'",
            "C.memory.compareTo(quantity('40Gi')) >= 0",
            "A.driverVersion.compareTo(semver('580.0.0')) >= 0",
            "A.productName.lowerAscii().matches('h100|h200')",
            "A.productName in ['NVIDIA L4', 'NVIDIA T4']",
            "'nvlinkPeers' in device.attributes['gpu.divvy.dev'] && A.nvlinkPeers > 1",
            "cel.bind(a, device.attributes['gpu.divvy.dev'], a.architecture == 'Hopper')",
            "has(A.nvlinkGroup) ? A.nvlinkPeers >= 2 : false",
            "device.attributes['resource.kubernetes.io'].numaNode == 0",
            "device.attributes['vendor.example.com'].anything == 3",
            "['H100', 'H200'].exists(name, A.productName.contains(name))",
            "device.capacity['gpu.divvy.dev']['memory'].isGreaterThan(quantity('10Gi'))",
        ] {
            check(&[Mode::Whole], text, &[]);
        }
    }

    #[test]
    fn each_mistake_has_one_message() {
        let check = |text, part| check(&[], text, &[part]);
        check(
            "A.memory >= \"16Gi\"",
            "memory is a capacity; write device.capacity[\"gpu.divvy.dev\"].memory",
        );
        check(
            "C.memory >= \"16Gi\"",
            "memory is a quantity and cannot be compared with a text; write compareTo(",
        );
        check("C.memory >= quantity('16Gi')", "operators cannot order quantities; use compareTo");
        check("C.memory.compareTo('16Gi') > 0", "needs a quantity, not a text; write quantity(\"16Gi\")");
        check("C.memory.compareTo(quantity('16GB')) > 0", "\"16GB\" is not a quantity");
        check("A.driverVersion >= '580'", "be compared with a text; write compareTo(semver(\"580.0.0\"))");
        check("A.type = 'gpu'", "write == to compare");
        check("A.driverVersion.compareTo(semver('580')) >= 0", "\"580\" is not a semantic version");
        check("A.profil == '1g.10gb'", "no device has the attribute profil; did you mean profile?");
        check("A.nvlinkPeers == '2'", "write 2 without quotes");
        check("A.profile == '1g.10g'", "no known device has the profile \"1g.10g\"; did you mean 1g.10gb?");
        check("A.type == 'gpus'", "did you mean gpu?");
        check("A.productName", "the result is a text, not true or false");
        check("A.productName && true", "this is a text, not true or false");
        check("device.attribute['gpu.divvy.dev'].type == 'gpu'", "did you mean attributes?");
        check("device.attributes['gpu.divy.dev'].type == 'gpu'", "did you mean gpu.divvy.dev?");
        check("device.attributes['gpu.nvidia.com'].type == 'gpu'", "write gpu.divvy.dev");
        check("device.attributes.type == 'gpu'", "type needs the domain of the driver");
        check("A.productName.startWith('NVIDIA')", "did you mean startsWith?");
        check("A.profil == \"1g.10gb", "close the quotation mark");
        check("A.profile ==", "CEL at 1:");
        check("A.productName == H100", "the name H100 is not declared; write a text in quotes");
        check("devices.driver == 'gpu.divvy.dev'", "did you mean device?");
        check("A.productName in [1, 2]", "productName is a text and cannot be compared with a number");
    }

    #[test]
    fn attributes_depend_on_the_mode() {
        check(
            &[Mode::Whole],
            "A.memoryMiB >= 40000",
            &["a whole GPU has no attribute memoryMiB; use device"],
        );
        check(&[Mode::Share], "A.memoryMiB >= 40000", &[]);
        check(&[Mode::Share], "A.profile == '1g.10gb'", &["a share has no attribute profile; only a MIG"]);
    }
}
