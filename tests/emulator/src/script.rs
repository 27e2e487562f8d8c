// SPDX-License-Identifier: Apache-2.0
//! Scripted behaviour: parsing rules and deciding which apply.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::abi::CODES;
use crate::record::{self, Call};

/// What a rule acts on. One occasion of a kind is one look at its rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Answer(Call),
    Slow(Call),
    Block(Call),
    PeerDown(Call),
    PeerDownThread(Call),
    Port,
    Region,
    VisibleAfter,
    RefuseZero,
    LateArgs,
    Delay,
    Hang,
    Result,
    Partial,
    Pending,
    NoResult,
    LosePeer,
    NeedRetry,
    Log,
    Report,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Value {
    None,
    Code(i32),
    Count(u64),
    Time(Duration),
    Text(String),
}

/// Which occasions of a rule it applies to, counted from 1, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Selector {
    first: u64,
    last: u64,
    every: u64,
}

const ALWAYS: Selector = Selector {
    first: 1,
    last: u64::MAX,
    every: 1,
};

impl Selector {
    fn applies(self, occasion: u64) -> bool {
        (self.first..=self.last).contains(&occasion) && occasion.is_multiple_of(self.every)
    }
}

#[derive(Debug)]
struct Rule {
    kind: Kind,
    value: Value,
    selector: Selector,
    occasions: u64,
}

static RULES: Mutex<Vec<Rule>> = Mutex::new(Vec::new());
/// Whether there is any rule: the common case costs one load.
static SCRIPTED: AtomicBool = AtomicBool::new(false);

const DEFAULT_LOG_LINES: u64 = 65_536;

/// Replaces the rules, or adds to them when `text` begins with `+`.
pub(crate) fn install(text: &str) -> Result<(), String> {
    let (adds, text) = match text.trim_start().strip_prefix('+') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let parsed = parse(text)?;
    let mut rules = RULES.lock();
    if !adds {
        rules.clear();
        record::set_log(None);
        record::set_report(None);
    }
    for rule in &parsed {
        match (&rule.kind, &rule.value) {
            (Kind::Log, Value::Count(lines)) => record::set_log(Some(*lines as usize)),
            (Kind::Log, _) => record::set_log(Some(DEFAULT_LOG_LINES as usize)),
            (Kind::Report, Value::Text(path)) => record::set_report(Some(path.clone())),
            _ => {}
        }
    }
    rules.extend(parsed);
    SCRIPTED.store(!rules.is_empty(), Ordering::Release);
    Ok(())
}

/// Forgets every rule.
pub(crate) fn clear() {
    let mut rules = RULES.lock();
    rules.clear();
    SCRIPTED.store(false, Ordering::Release);
}

fn fire(kind: Kind) -> Option<Value> {
    if !SCRIPTED.load(Ordering::Acquire) {
        return None;
    }
    let mut winner = None;
    for rule in RULES.lock().iter_mut().filter(|rule| rule.kind == kind) {
        rule.occasions += 1;
        if winner.is_none() && rule.selector.applies(rule.occasions) {
            winner = Some(rule.value.clone());
        }
    }
    winner
}

/// Whether a rule without a value applies to this occasion.
pub(crate) fn flag(kind: Kind) -> bool {
    fire(kind).is_some()
}

/// The code that a rule gives for this occasion.
pub(crate) fn code(kind: Kind) -> Option<i32> {
    match fire(kind) {
        Some(Value::Code(code)) => Some(code),
        _ => None,
    }
}

/// The number that a rule gives for this occasion.
pub(crate) fn count(kind: Kind) -> Option<u64> {
    match fire(kind) {
        Some(Value::Count(count)) => Some(count),
        _ => None,
    }
}

/// The duration that a rule gives for this occasion.
pub(crate) fn time(kind: Kind) -> Option<Duration> {
    match fire(kind) {
        Some(Value::Time(time)) => Some(time),
        _ => None,
    }
}

/// The text that a rule gives for this occasion.
pub(crate) fn text(kind: Kind) -> Option<String> {
    match fire(kind) {
        Some(Value::Text(text)) => Some(text),
        _ => None,
    }
}

fn parse(text: &str) -> Result<Vec<Rule>, String> {
    text.split([';', '\n'])
        .map(str::trim)
        .filter(|rule| !rule.is_empty())
        .map(parse_rule)
        .collect()
}

fn parse_rule(rule: &str) -> Result<Rule, String> {
    let bad = |why: String| format!("emulator script: rule {rule:?}: {why}");
    // The selector is the last '@': a path may hold one of its own.
    let (body, selector) = match rule.rsplit_once('@') {
        Some((body, selector)) => (body.trim(), parse_selector(selector.trim()).map_err(bad)?),
        None => (rule, ALWAYS),
    };
    let (name, value) = match body.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (body, None),
    };
    let kind = parse_kind(name).ok_or_else(|| bad(format!("unknown name {name:?}")))?;
    let value = parse_value(kind, value).map_err(bad)?;
    if matches!(kind, Kind::Log | Kind::Report) && selector != ALWAYS {
        return Err(bad(format!("{name} takes no selector")));
    }
    Ok(Rule {
        kind,
        value,
        selector,
        occasions: 0,
    })
}

fn parse_kind(name: &str) -> Option<Kind> {
    Some(match name {
        "port" => Kind::Port,
        "region" => Kind::Region,
        "visible_after" => Kind::VisibleAfter,
        "refuse_zero" => Kind::RefuseZero,
        "late_args" => Kind::LateArgs,
        "delay" => Kind::Delay,
        "hang" => Kind::Hang,
        "result" => Kind::Result,
        "partial" => Kind::Partial,
        "pending" => Kind::Pending,
        "no_result" => Kind::NoResult,
        "lose_peer" => Kind::LosePeer,
        "need_retry" => Kind::NeedRetry,
        "log" => Kind::Log,
        "report" => Kind::Report,
        _ => {
            let about = |prefix: &str| name.strip_prefix(prefix).and_then(Call::from_script_name);
            return Call::from_script_name(name)
                .filter(|call| !matches!(call, Call::Uninit | Call::Destroy))
                .map(Kind::Answer)
                .or_else(|| about("slow_").map(Kind::Slow))
                .or_else(|| about("block_").map(Kind::Block))
                .or_else(|| about("peer_down_thread_").map(Kind::PeerDownThread))
                .or_else(|| about("peer_down_").map(Kind::PeerDown));
        }
    })
}

fn parse_value(kind: Kind, value: Option<&str>) -> Result<Value, String> {
    let wanted = |what: &str| value.ok_or_else(|| format!("it needs a value, {what}"));
    match kind {
        Kind::Answer(Call::Create) => match wanted("null")? {
            "null" => Ok(Value::Code(0)),
            other => Err(format!("create can only answer null, not {other:?}")),
        },
        Kind::Answer(call) => {
            let code = parse_code(wanted("a code")?)?;
            if call == Call::Query && code == 0 {
                return Err("query cannot answer 0 without a result; use no_result".into());
            }
            Ok(Value::Code(code))
        }
        Kind::Region | Kind::Result | Kind::NeedRetry => {
            parse_code(wanted("a code")?).map(Value::Code)
        }
        Kind::Slow(_) | Kind::VisibleAfter | Kind::Delay => {
            parse_duration(wanted("a duration such as 5ms")?).map(Value::Time)
        }
        Kind::PeerDown(_) | Kind::PeerDownThread(_) => {
            wanted("the peer's name").map(|peer| Value::Text(peer.to_owned()))
        }
        Kind::Report => wanted("a path").map(|path| Value::Text(path.to_owned())),
        Kind::Port => {
            let port = parse_count(wanted("a port")?)?;
            u16::try_from(port).map_err(|_| format!("{port} is no port, 0 to 65535"))?;
            Ok(Value::Count(port))
        }
        Kind::Partial | Kind::Pending => parse_count(wanted("a number")?).map(Value::Count),
        Kind::Log => match value {
            None => Ok(Value::None),
            Some(lines) => match parse_count(lines)? {
                0 => Err("the log needs room for a line".into()),
                lines => Ok(Value::Count(lines)),
            },
        },
        Kind::Block(_)
        | Kind::RefuseZero
        | Kind::LateArgs
        | Kind::Hang
        | Kind::NoResult
        | Kind::LosePeer => match value {
            None => Ok(Value::None),
            Some(value) => Err(format!("it takes no value, but has {value:?}")),
        },
    }
}

fn parse_code(text: &str) -> Result<i32, String> {
    if let Some((code, _)) = CODES.iter().find(|(_, name)| *name == text) {
        return Ok(*code);
    }
    text.parse()
        .map_err(|_| format!("{text:?} is no code (a 32-bit number or a name like SM_ERROR)"))
}

fn parse_count(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is no whole number"))
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u32 = digits
        .parse()
        .map_err(|_| format!("{text:?} is no duration (5us, 5ms, 5s)"))?;
    match &text[digits.len()..] {
        "us" => Ok(Duration::from_micros(number.into())),
        "" | "ms" => Ok(Duration::from_millis(number.into())),
        "s" => Ok(Duration::from_secs(number.into())),
        unit => Err(format!("unknown unit {unit:?} in {text:?} (us, ms or s)")),
    }
}

fn parse_selector(text: &str) -> Result<Selector, String> {
    let occasion = |text: &str| match text.trim().parse::<u64>() {
        Ok(0) | Err(_) => Err(format!("{text:?} is no occasion, a whole number from 1 on")),
        Ok(number) => Ok(number),
    };
    if let Some(every) = text.strip_prefix('%') {
        return Ok(Selector {
            every: occasion(every)?,
            ..ALWAYS
        });
    }
    let (first, last) = match text.split_once("..") {
        None => {
            let only = occasion(text)?;
            (only, only)
        }
        Some(("", "")) => return Err("the selector .. selects nothing in particular".into()),
        Some((first, "")) => (occasion(first)?, u64::MAX),
        Some(("", last)) => (1, occasion(last)?),
        Some((first, last)) => (occasion(first)?, occasion(last)?),
    };
    if first > last {
        return Err(format!("the selector {text} selects nothing"));
    }
    Ok(Selector {
        first,
        last,
        every: 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        let mut rules = parse(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(rules.len(), 1);
        rules.remove(0)
    }

    #[test]
    fn a_rule_has_a_name_a_value_and_a_selector() {
        let rule = rule(" submit = SM_NOT_CONNECTED @ 3 ");
        assert_eq!(rule.kind, Kind::Answer(Call::BatchCopy));
        assert_eq!(rule.value, Value::Code(-2014));
        assert_eq!((rule.selector.first, rule.selector.last), (3, 3));
    }

    #[test]
    fn selectors_count_from_one_and_include_both_ends() {
        let applies = |text: &str| {
            let selector = rule(&format!("hang@{text}")).selector;
            (1..=6)
                .filter(|&n| selector.applies(n))
                .collect::<Vec<u64>>()
        };
        assert_eq!(applies("2"), [2]);
        assert_eq!(applies("2..4"), [2, 3, 4]);
        assert_eq!(applies("5.."), [5, 6]);
        assert_eq!(applies("..2"), [1, 2]);
        assert_eq!(applies("%3"), [3, 6]);
    }

    #[test]
    fn durations_have_units_and_default_to_milliseconds() {
        let time = |text: &str| rule(&format!("delay={text}")).value;
        assert_eq!(time("7"), Value::Time(Duration::from_millis(7)));
        assert_eq!(time("7ms"), Value::Time(Duration::from_millis(7)));
        assert_eq!(time("7us"), Value::Time(Duration::from_micros(7)));
        assert_eq!(time("7s"), Value::Time(Duration::from_secs(7)));
    }

    #[test]
    fn rules_are_separated_by_semicolons_or_newlines_and_may_be_empty() {
        assert_eq!(
            parse("; hang@2;\n\n delay=1ms ;").map(|rules| rules.len()),
            Ok(2)
        );
        assert_eq!(parse("").map(|rules| rules.len()), Ok(0));
    }

    #[test]
    fn call_rules_know_every_call_by_its_prefix() {
        assert_eq!(
            rule("slow_batch_register=1").kind,
            Kind::Slow(Call::BatchRegisterMem)
        );
        assert_eq!(rule("block_query").kind, Kind::Block(Call::Query));
        assert_eq!(
            rule("peer_down_submit=a:1").kind,
            Kind::PeerDown(Call::BatchCopy)
        );
        assert_eq!(
            rule("peer_down_thread_query=a:1").kind,
            Kind::PeerDownThread(Call::Query)
        );
        assert_eq!(rule("create=null").kind, Kind::Answer(Call::Create));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_rule_and_the_reason() {
        for (script, reason) in [
            ("nonsense", "unknown name"),
            ("destroy=-1", "unknown name"),
            ("submit", "needs a value"),
            ("submit=often", "is no code"),
            ("submit=99999999999", "is no code"),
            ("query=0", "no_result"),
            ("create=-1", "only answer null"),
            ("delay=5h", "unknown unit"),
            ("delay=-5", "is no duration"),
            ("hang=1", "takes no value"),
            ("hang@0", "is no occasion"),
            ("hang@3..2", "selects nothing"),
            ("hang@..", "selects nothing"),
            ("port=70000", "is no port"),
            ("log=0", "room for a line"),
            ("log@2", "takes no selector"),
        ] {
            let error = parse(script).map(|_| ()).expect_err(script);
            assert!(
                error.contains(reason) && error.contains("rule"),
                "{script}: {error}"
            );
        }
    }
}
