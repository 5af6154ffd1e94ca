//! `cargo xtask attack` measures how an attack on an aggregator affects other tenants.
//!
//! A tenant requests results again and again, or its ranks send control messages without end
//! (`tests/src/attack.rs`). A crowd of jobs waits for room (`tests/src/queues.rs`). Callers fall
//! silent in the middle of their handshakes (`tests/examples/initials.rs`). All attacks stay on
//! this host and end by themselves.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use racksum_tools::deadline::Deadline;
use racksum_tools::interrupt;
use racksum_tools::shell::{Cmd, path, target};

use crate::bench;

/// Duration of an attack and number of rounds.
#[derive(Debug, Args)]
pub(crate) struct AttackArgs {
    /// Duration of each attack in seconds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    /// Number of rounds; the bounds apply to the median of each figure.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

/// A figure and the largest value that it may have.
#[derive(Debug, Clone, PartialEq)]
struct Figure {
    what: String,
    values: Vec<f64>,
    most: f64,
}

impl Figure {
    fn median(&self) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn is_kept(&self) -> bool {
        self.median() <= self.most
    }
}

/// Runs all attacks; returns `true` if every figure is within its bound.
pub(crate) fn run(root: &Path, args: &AttackArgs) -> Result<bool> {
    interrupt::listen()?;
    let mut figures = tenant(root, args)?;
    figures.extend(strangers(root, args)?);
    print!("{}", table(&figures));
    println!("\na crowd of jobs that wait for room:");
    let crowd = bench::failures(root, "queues::", args.rounds)?;
    Ok(crowd && figures.iter().all(Figure::is_kept))
}

/// Measures the effect of a tenant's attacks on another tenant's job.
fn tenant(root: &Path, args: &AttackArgs) -> Result<Vec<Figure>> {
    let cargo_args = ["test", "--release", "--locked", "-p", "racksum-tests", "--lib", "attack"];
    let command =
        Cmd::cargo(&[&cargo_args[..], &["--", "--nocapture", "--test-threads=1"]].concat())
            .env("RACKSUM_ATTACK_S", args.seconds.to_string());
    let mut figures: Vec<Figure> = Vec::new();
    for _ in 0..args.rounds {
        interrupt::check()?;
        let printed = command.output(root)?;
        let found: Vec<_> = printed.lines().map(attack_line).collect::<Result<_>>()?;
        let found: Vec<_> = found.into_iter().flatten().collect();
        if found.is_empty() {
            bail!("{command} printed no figures");
        }
        for (what, value, most) in found {
            match figures.iter_mut().find(|figure| figure.what == what) {
                Some(figure) => figure.values.push(value),
                None => figures.push(Figure { what, values: vec![value], most }),
            }
        }
    }
    Ok(figures)
}

/// Returns the figures of a line that an attack prints, `attack=NAME key=value ...`, and the bound
/// of each. Any other line has no figures. The two byte counts may be missing together, because
/// some attacks get no answers. Any other missing value is an error.
fn attack_line(line: &str) -> Result<Vec<(String, f64, f64)>> {
    let Some((_, rest)) = line.split_once("attack=") else { return Ok(Vec::new()) };
    let (name, fields) = rest.split_once(' ').unwrap_or((rest, ""));
    let fields: BTreeMap<_, f64> = fields
        .split_whitespace()
        .filter_map(|field| field.split_once('='))
        .filter_map(|(key, value)| Some((key, value.parse().ok()?)))
        .collect();
    let of = |key: &str| {
        fields.get(key).copied().with_context(|| format!("an attack printed no {key}: {line}"))
    };
    let ratio = |over: &str, under: &str| Ok::<_, anyhow::Error>(of(over)? / of(under)?.max(1.0));
    let mut figures = Vec::new();
    if ["bytes_out", "bytes_in"].iter().any(|key| fields.contains_key(key)) {
        figures.push(("bytes out / in", ratio("bytes_out", "bytes_in")?, 2.0));
    }
    // Two tenants share the aggregator, so half of a lone tenant's throughput is fair. The bound is
    // 80 % of that half.
    let fair = 0.5 / of("throughput_share")?.max(1e-9);
    figures.push(("other tenant's p99 / quiet", ratio("attacked_p99_us", "quiet_p99_us")?, 3.0));
    figures.push(("fair half / other tenant's ops", fair, 1.0 / 0.8));
    let named = figures.into_iter().map(|(what, value, most)| {
        let what = format!("{name}: {what}");
        (what, value, most)
    });
    Ok(named.collect())
}

/// Measures how callers that fall silent affect ranks that join.
fn strangers(root: &Path, args: &AttackArgs) -> Result<Vec<Figure>> {
    Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
    let example = ["-p", "racksum-tests", "--example", "initials"];
    Cmd::cargo(&[&["build", "--release", "--locked"], &example[..]].concat()).run(root)?;
    let mut figures = Vec::new();
    for (addresses, rate) in [(1, 1000), (50, 50 * 200)] {
        interrupt::check()?;
        let flood = flood(root, addresses, rate, args.seconds)?;
        let name = format!("{rate} silent callers a second from {addresses} addresses");
        let figure = |what, value, most| Figure {
            what: format!("{name}: {what}"),
            values: vec![value],
            most,
        };
        figures.push(figure("joins of 20 that failed", flood.failed, 0.0));
        figures.push(figure("longest join (s)", flood.longest, 3.0));
        figures.push(figure("log lines a second", flood.log_lines, 1.0));
    }
    Ok(figures)
}

/// The effect of a flood on joining ranks.
struct Flooded {
    failed: f64,
    longest: f64,
    log_lines: f64,
}

/// Number of joins during a flood.
const JOINS: u32 = 20;

/// Floods an aggregator while ranks join, until both the joins and the attack time are over.
fn flood(root: &Path, addresses: u32, rate: u32, seconds: u64) -> Result<Flooded> {
    let log = target(root).join("attack.log");
    let program = target(root).join("release/racksum");
    let mut aggregator = Running::start(
        Command::new(&program)
            .args(["aggregator", "--port", "0", "--pool-mib", "64", "--max-jobs", "64"])
            .env_remove("RACKSUM_LOG")
            .stdout(Stdio::piped())
            .stderr(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?),
    )?;
    let addr = aggregator.address()?;
    let flooder = target(root).join("release/examples/initials");
    // The flood lasts until the joins are over, or at most this many seconds.
    let most = (seconds + 3 * u64::from(JOINS)).to_string();
    let flooder_args = [&addr, &addresses.to_string(), &rate.to_string(), &most];
    let _flooding = Running::start(Command::new(flooder).args(flooder_args).stdout(Stdio::null()))?;
    let lasts = Deadline::after(Duration::from_secs(seconds));
    std::thread::sleep(Duration::from_secs(1));
    let (mut failed, mut longest) = (0, Duration::ZERO);
    for number in 0..JOINS {
        interrupt::check()?;
        let job = format!("join-{number}");
        let bench_args =
            ["bench", "--aggregator", &addr, "--rank", "0", "--world", "1", "--job", &job];
        let size = ["-b", "4K", "-e", "4K", "-n", "1", "-w", "0"];
        let took = Deadline::after(Duration::from_secs(3));
        let joined =
            Cmd::new(path(&program)?, &[&bench_args[..], &size[..]].concat()).succeeds(root);
        failed += u32::from(!joined);
        longest = longest.max(took.elapsed());
    }
    while !lasts.is_over() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let lasted = lasts.elapsed().as_secs_f64();
    drop(aggregator);
    let lines = fs::read_to_string(&log).unwrap_or_default().lines().count();
    let log_lines = lines as f64 / lasted;
    Ok(Flooded { failed: failed.into(), longest: longest.as_secs_f64(), log_lines })
}

/// A process that is killed when this value is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Result<Self> {
        let started = command.stdin(Stdio::null()).spawn();
        Ok(Self(started.with_context(|| format!("cannot start {command:?}"))?))
    }

    /// Returns the address that an aggregator prints on its first line.
    fn address(&mut self) -> Result<String> {
        let out = self.0.stdout.take().context("the aggregator's output is not captured")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).context("cannot read the aggregator's output")?;
        let addr = line.split_once(" on ").and_then(|(_, rest)| rest.split_once(": "));
        Ok(addr
            .with_context(|| format!("unexpected first line of the aggregator: {line:?}"))?
            .0
            .to_owned())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // `kill` fails if the process has ended already, which is fine.
        self.0.kill().unwrap_or_default();
        drop(self.0.wait());
    }
}

/// Formats a line for each figure.
fn table(figures: &[Figure]) -> String {
    let width = figures.iter().map(|figure| figure.what.chars().count()).max().unwrap_or(0);
    let mut text = format!("{:<width$} {:>9} {:>9}\n", "figure", "median", "must be <=");
    for figure in figures {
        let verdict = if figure.is_kept() { "PASS" } else { "FAIL" };
        let (what, most) = (&figure.what, figure.most);
        text += &format!("{what:<width$} {:>9.2} {most:>9.2}  {verdict}\n", figure.median());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_an_attack_is_read_and_judged_by_its_median() {
        let line = "test x ... attack=asks seconds=1 bytes_in=100 bytes_out=150 quiet_p50_us=1 \
                    quiet_p99_us=10 attacked_p50_us=2 attacked_p99_us=40 throughput_share=0.5";
        let found = attack_line(line).unwrap();
        let values: Vec<_> = found.iter().map(|(what, value, _)| (&**what, *value)).collect();
        assert_eq!(values[0], ("asks: bytes out / in", 1.5));
        assert_eq!(values[1], ("asks: other tenant's p99 / quiet", 4.0));
        assert_eq!(values[2], ("asks: fair half / other tenant's ops", 1.0));
        assert_eq!(attack_line("test y ... ok").unwrap(), []);
        let figure = |values: &[f64]| Figure { what: "a".into(), values: values.into(), most: 3.0 };
        assert!(figure(&[9.0, 3.0, 1.0]).is_kept());
        assert!(!figure(&[9.0, 3.1, 1.0]).is_kept());
        assert!(!figure(&[]).is_kept(), "a figure without values must fail");
    }

    #[test]
    fn only_the_bytes_of_an_attack_may_be_missing_and_both_of_them() {
        let fields = ["quiet_p99_us=1", "attacked_p99_us=2", "throughput_share=0.5"];
        let line = |fields: &[&str]| format!("attack=words seconds=1 {}", fields.join(" "));
        assert_eq!(attack_line(&line(&fields)).unwrap().len(), 2);
        for missing in fields {
            let left: Vec<_> = fields.into_iter().filter(|field| *field != missing).collect();
            let why = attack_line(&line(&left)).unwrap_err().to_string();
            let (key, _) = missing.split_once('=').unwrap();
            assert!(why.starts_with(&format!("an attack printed no {key}: attack=words")), "{why}");
        }
        for bytes in ["bytes_in=1", "bytes_out=1"] {
            attack_line(&line(&[&fields[..], &[bytes]].concat())).unwrap_err();
        }
        attack_line("attack=words").unwrap_err();
    }
}
