//! Formats results for people, and as JSON lines for programs.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::case::{Bound, Case, Grade, Memory, Race};
use crate::host::Provenance;
use crate::memory;
use crate::network::{Drops, HOST_TBF, SWITCH_TBF};
use crate::race::{self, BoundOutcome, Rounds, SideOutcome};
use crate::stats::ms;

/// The result of a case.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ending {
    Race(race::Outcome),
    Memory(memory::Outcome),
    /// The case was not run, for this reason.
    Skipped(String),
    /// The case failed with this error.
    Failed(String),
}

/// A line of the results.
#[derive(Debug, Serialize)]
pub(crate) struct Record<'a> {
    case: &'a str,
    #[serde(flatten)]
    provenance: Provenance,
    rounds: Rounds,
    /// Limits of a slow link, at the host and at the switch.
    slow_link: [&'static str; 2],
    #[serde(flatten)]
    params: Params<'a>,
    #[serde(flatten)]
    ending: &'a Ending,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Params<'a> {
    Race { race_of: &'a Race },
    Memory { memory_of: &'a Memory },
}

impl<'a> Record<'a> {
    pub(crate) const fn new(
        case: &'a Case,
        provenance: Provenance,
        rounds: Rounds,
        ending: &'a Ending,
    ) -> Self {
        let (name, params) = match case {
            Case::Race(race) => (race.name.as_str(), Params::Race { race_of: race }),
            Case::Memory(memory) => (memory.name, Params::Memory { memory_of: memory }),
        };
        Self { case: name, provenance, rounds, slow_link: [HOST_TBF, SWITCH_TBF], params, ending }
    }

    /// Appends the line to a file.
    pub(crate) fn append(&self, path: &Path) -> Result<()> {
        let context = || format!("cannot write {}", path.display());
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(context)?;
        }
        let line = serde_json::to_string(self).context("cannot write a result as JSON")?;
        let mut file =
            OpenOptions::new().create(true).append(true).open(path).with_context(context)?;
        writeln!(file, "{line}").with_context(context)
    }
}

impl Ending {
    /// Formats the results of a case for people.
    pub(crate) fn table(&self) -> String {
        match self {
            Self::Skipped(why) => format!("  skipped: {why}\n"),
            Self::Failed(why) => format!("  FAILED: {why}\n"),
            Self::Memory(outcome) => of_memory(outcome),
            Self::Race(outcome) => {
                let mut text = format!(
                    "  {:<18} {:>9} {:>9} {:>9} {:>9}  {:>8} {:>8}  {:>6}\n",
                    "side", "median", "min", "max", "a rank", "tx/own", "rx/union", "again"
                );
                for side in &outcome.sides {
                    text += &of_side(side);
                }
                for bound in &outcome.bounds {
                    text += &of_bound(bound);
                }
                text
            }
        }
    }

    /// Formats the case's rows in the final table: figure, value, must, reach and verdict.
    pub(crate) fn verdicts(&self, case: &str) -> Vec<String> {
        let row = |figure: &str, value: &str, must: &str, reach: &str, verdict: &str| {
            format!("{case:<20} {figure:<32} {value:>9} {must:>12} {reach:>12}  {verdict}")
        };
        match self {
            Self::Skipped(_) => vec![row("", "", "", "", "skipped")],
            Self::Failed(_) => vec![row("", "", "", "", "FAILED")],
            Self::Memory(outcome) => {
                let must = format!("<= {}", mb(outcome.most));
                vec![row("peak memory", &mb(outcome.peak), &must, "", outcome.verdict.name())]
            }
            Self::Race(outcome) => {
                let of_bound = |bound: &BoundOutcome| {
                    let [value, must, reach] = shown(bound);
                    row(&bound.name, &value, &must, &reach, bound.verdict.name())
                };
                let mut rows: Vec<_> = outcome.bounds.iter().map(of_bound).collect();
                for side in &outcome.sides {
                    if side.failed.is_some() {
                        rows.push(row(side.name, "", "", "", "FAILED"));
                    }
                    if let Some(thrift) = side.thrift {
                        let value = percent(thrift.tx.max(thrift.rx));
                        let verdict = if thrift.holds { Grade::Pass } else { Grade::Missed };
                        let figure = format!("bytes of {} (I3)", side.name);
                        rows.push(row(&figure, &value, "<= 106 % + 1", "", verdict.name()));
                    }
                }
                rows
            }
        }
    }

    /// Returns whether nothing was measured because the machine lacks something.
    pub(crate) const fn is_skipped(&self) -> bool {
        matches!(self, Self::Skipped(_))
    }

    /// Returns whether the case or one of its sides failed.
    pub(crate) fn is_failed(&self) -> bool {
        match self {
            Self::Failed(_) => true,
            Self::Skipped(_) | Self::Memory(_) => false,
            Self::Race(outcome) => outcome.sides.iter().any(|side| side.failed.is_some()),
        }
    }

    /// Returns whether the case ran without a failure and stayed within its bounds and I3.
    pub(crate) fn is_as_demanded(&self) -> bool {
        let good = |verdict| matches!(verdict, Grade::Reach | Grade::Pass);
        match self {
            Self::Skipped(_) | Self::Failed(_) => false,
            Self::Memory(outcome) => good(outcome.verdict),
            Self::Race(outcome) => {
                !self.is_failed()
                    && outcome.bounds.iter().all(|bound| good(bound.verdict))
                    && outcome.sides.iter().filter_map(|s| s.thrift).all(|thrift| thrift.holds)
            }
        }
    }
}

/// Formats the head of the final table.
pub(crate) fn verdicts_head() -> String {
    let [case, figure] = ["case", "figure"];
    format!("{case:<20} {figure:<32} {:>9} {:>12} {:>12}  verdict", "measured", "must", "reach")
}

fn of_side(side: &SideOutcome) -> String {
    let name = side.name;
    let (Some(summary), Some(of_ranks)) = (side.summary, side.rank_summary) else {
        let why = side.skipped.as_deref().unwrap_or("no round was completed");
        let failed = side.failed.as_ref().map(|how| format!("FAILED in {how}"));
        let why = failed.unwrap_or_else(|| format!("not measured: {why}"));
        return format!("  {name:<18} {why}\n");
    };
    let mut text = format!("  {name:<18}");
    for us in [summary.median, summary.min, summary.max, of_ranks.median] {
        write!(text, " {:>9}", ms(us)).expect("writing to a string cannot fail");
    }
    if let Some(thrift) = side.thrift {
        let (tx, rx) = (percent(thrift.tx), percent(thrift.rx));
        let verdict = if thrift.holds { "I3 holds" } else { "I3 BROKEN" };
        write!(text, "  {tx:>8} {rx:>8}  {:>6}  {verdict}", side.retransmits)
            .expect("writing to a string cannot fail");
    }
    let Drops { at_hosts, at_switch } = side.drops;
    if at_hosts + at_switch > 0 {
        write!(text, "; queues dropped {at_hosts} at hosts, {at_switch} at the switch")
            .expect("writing to a string cannot fail");
    }
    if let Some(us) = side.predicted_us {
        write!(text, "  predicted {}", ms(us)).expect("writing to a string cannot fail");
    }
    if let Some(how) = &side.failed {
        write!(text, "\n  {name:<18} FAILED in {how}").expect("writing to a string cannot fail");
    }
    text + "\n"
}

fn of_bound(bound: &BoundOutcome) -> String {
    let [value, must, reach] = shown(bound);
    let (name, verdict) = (&bound.name, bound.verdict.name());
    format!("  {name}: {value}; must be {must}, reach {reach}: {verdict}\n")
}

/// Formats a figure and its two limits, `must` and `reach`, for people.
fn shown(bound: &BoundOutcome) -> [String; 3] {
    let figure = bound.figure;
    let value = bound.value.map_or_else(|| "-".to_owned(), |value| figure.show(value));
    let limit = |limit| format!("{} {}", figure.sign(), figure.show(limit));
    [value, limit(bound.must), limit(bound.reach)]
}

/// Formats the bounds of a case for `--list`.
pub(crate) fn demands(bounds: &[Bound]) -> String {
    let demand = |Bound { figure, must, reach }: &Bound| {
        let (name, sign) = (figure.name(), figure.sign());
        format!("{name} {sign} {} (reach {})", figure.show(*must), figure.show(*reach))
    };
    bounds.iter().map(demand).collect::<Vec<_>>().join(", ")
}

fn of_memory(outcome: &memory::Outcome) -> String {
    let memory::Outcome { pool, at_start, after, peak, most, verdict } = outcome;
    format!(
        "  pool {}; resident at start {}, after {}, at most {}; must be <= {}: {}\n",
        mb(*pool),
        mb(*at_start),
        mb(*after),
        mb(*peak),
        mb(*most),
        verdict.name()
    )
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn mb(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Figure;
    use crate::stats::Summary;
    use crate::volume::{Thrift, Volume};

    fn race_ending(holds: bool, verdict: Grade) -> Ending {
        let summary = Summary::of(&[200_000.0, 210_000.0, 205_000.0]);
        let side = SideOutcome {
            name: "racksum",
            skipped: None,
            failed: None,
            summary,
            predicted_us: Some(190_000.0),
            rank_summary: summary,
            thrift: Some(Thrift { tx: 1.017, rx: 1.02, holds }),
            retransmits: 3,
            drops: Drops { at_hosts: 0, at_switch: 9 },
            rounds_us: Vec::new(),
            times_us: vec![vec![200_000.0], vec![210_000.0], vec![205_000.0]],
            rank_times_us: Vec::new(),
            last_traffic: None,
        };
        let figure = Figure::Gain("racksum", "gloo");
        let (name, value) = (figure.name(), Some(1.5));
        let bound = BoundOutcome { figure, name, value, must: 1.45, reach: 1.7, verdict };
        let volume = Volume { own: vec![1], union: 1 };
        Ending::Race(race::Outcome { volume, sides: vec![side], bounds: vec![bound] })
    }

    #[test]
    fn a_table_has_a_line_for_each_side_and_each_bound() {
        let table = race_ending(true, Grade::Pass).table();
        assert!(table.contains("205 ms") && table.contains("101.7 %"), "{table}");
        assert!(table.contains("I3 holds; queues dropped 0 at hosts, 9 at the"), "{table}");
        assert!(table.contains("predicted 190 ms"), "{table}");
        let bound = "gloo / racksum: 1.50; must be >= 1.45, reach >= 1.70: PASS\n";
        assert!(table.contains(bound), "{table}");
        assert!(race_ending(false, Grade::Pass).table().contains("I3 BROKEN"));
    }

    #[test]
    fn only_what_was_measured_and_holds_is_as_demanded() {
        assert!(race_ending(true, Grade::Reach).is_as_demanded());
        assert!(!race_ending(true, Grade::Missed).is_as_demanded());
        assert!(!race_ending(true, Grade::NotMeasured).is_as_demanded());
        assert!(!race_ending(false, Grade::Pass).is_as_demanded());
        assert!(!Ending::Skipped("no root".to_owned()).is_as_demanded());
    }

    #[test]
    fn a_record_is_one_line_of_json_with_all_that_a_reader_needs() {
        let case = crate::cases::all(7).remove(0);
        let ending = race_ending(true, Grade::Pass);
        let provenance = Provenance::now(Path::new("."));
        let rounds = Rounds { setups: 1, warmup: 2, counted: 3 };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/results.jsonl");
        for _ in 0..2 {
            Record::new(&case, provenance.clone(), rounds, &ending).append(&path).unwrap();
        }
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().count(), 2);
        let record: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(record["case"], "dense-loopback-w2");
        assert_eq!(record["race_of"]["data"]["seed"], 7);
        assert_eq!(record["rounds"]["counted"], 3);
        assert_eq!(record["race"]["sides"][0]["times_us"][1][0], 210_000.0);
        assert_eq!(record["race"]["bounds"][0]["verdict"], "pass");
        for key in ["commit", "dirty", "kernel", "cores", "cpu", "slow_link"] {
            assert!(!record[key].is_null(), "{key}");
        }
    }
}
