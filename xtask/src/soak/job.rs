//! A job of a soak: its rank processes, an optional victim, and the checks of the outcome.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use racksum_tools::deadline::Deadline;
use serde_json::Value;

use super::{Tally, lock};

/// Random numbers that depend only on the seed (xorshift64*, Vigna 2016).
#[derive(Debug)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number from `low` to `high`, both included.
    pub(super) const fn between(&mut self, low: u64, high: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        low + (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % (high - low + 1)
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        let last = all.len().saturating_sub(1) as u64;
        all[usize::try_from(self.between(0, last)).unwrap_or(0)]
    }
}

/// The settings of a job.
#[derive(Debug)]
pub(super) struct SoakJob {
    name: String,
    world: u64,
    /// The aggregators that the ranks join, in rank order. If there are more ranks, the list
    /// repeats.
    aggregators: Vec<String>,
    flags: Vec<String>,
    /// The rank to kill, and when.
    victim: Option<(usize, Duration)>,
}

/// A rank's process.
struct Rank {
    child: Child,
    out: std::path::PathBuf,
}

impl SoakJob {
    pub(super) fn new(name: &str, aggregators: Vec<String>, draw: &mut Draw) -> Self {
        let world = draw.between(2, 4);
        let wire = draw.one_of(&["f32", "f32", "bf16", "int8", "fixed32"]);
        let victim = draw.between(0, 2) == 0;
        let faults = draw.one_of(&["0", "0", "0.01"]);
        let last = draw.one_of(&["64K", "1M", "4M"]);
        // A job with a victim runs long enough that the victim is still running when it is killed.
        let (least, most, step) = if victim {
            (last, "64M", ("step-bytes", "4"))
        } else {
            ("1K", last, ("step-factor", "2"))
        };
        let flags = [
            ("job", name),
            ("min-bytes", least),
            ("max-bytes", most),
            step,
            ("iters", "1"),
            ("warmup-iters", "0"),
            ("timeout", "60"),
            ("format", "json"),
            ("wire", wire),
            ("drop", faults),
            ("dup", faults),
            ("reorder", faults),
        ];
        let mut flags: Vec<String> =
            flags.iter().map(|(flag, value)| format!("--{flag}={value}")).collect();
        flags.push(format!("--world={world}"));
        flags.push(format!("--seed={}", draw.between(1, 1_000_000)));
        let at = Duration::from_millis(draw.between(50, 1_500));
        let whom = usize::try_from(draw.between(0, world - 1)).unwrap_or(0);
        let victim = victim.then_some((whom, at));
        Self { name: name.to_owned(), world, aggregators, flags, victim }
    }

    /// Runs the job and records its outcome.
    pub(super) fn run(&self, program: &Path, logs: &Path, tally: &Mutex<Tally>) {
        let judged = self.judge(program, logs, tally);
        let mut tally = lock(tally);
        tally.jobs += 1;
        if let Err(error) = judged {
            let (name, flags) = (&self.name, self.flags.join(" "));
            tally.fault(format!("{name} ({:?}, {flags}): {error:#}", self.victim));
        }
    }

    fn judge(&self, program: &Path, logs: &Path, tally: &Mutex<Tally>) -> Result<()> {
        let kill_at = Deadline::after(self.victim.map_or(Duration::ZERO, |(_, at)| at));
        let ranks = (0..self.world).map(|rank| self.start(rank, program, logs));
        let mut ranks = ranks.collect::<Result<Vec<_>>>()?;
        let (mut killed, mut why) = (false, String::new());
        if let Some((victim, _)) = self.victim {
            while !kill_at.is_over() {
                sleep(POLL);
            }
            killed = ranks[victim].child.try_wait()?.is_none();
            ranks[victim].child.kill().context("cannot kill a rank")?;
            lock(tally).ranks_killed += u64::from(killed);
            if !killed {
                why += &format!("rank {victim} ended before it was killed; ");
            }
        }
        let (mut ops, mut named) = (Vec::new(), false);
        for (rank, process) in ranks.iter_mut().enumerate() {
            let status = process.wait()?;
            let (out, errors) = process.output()?;
            let (right, wrong) = checked(&out);
            ops.push(right);
            if wrong > 0 {
                why += &format!("rank {rank} has wrong sums in {wrong} ops; ");
            }
            let is_victim = self.victim.is_some_and(|(victim, _)| victim == rank);
            let names = self.victim.is_some_and(|(victim, _)| names(&errors, victim));
            named |= names;
            // A rank that lost another rank reports the loss and exits on its own.
            let reports = names && status.code() > Some(0) && !errors.contains("panicked");
            let well = if killed { is_victim || reports } else { status.success() };
            if !well {
                why += &format!("rank {rank}: {status}: {}; ", errors.trim());
            }
        }
        if self.victim.is_none() && (ops[0] == 0 || ops.iter().any(|one| *one != ops[0])) {
            why += &format!("the ranks report unequal or zero op counts: {ops:?}; ");
        }
        let mut tally = lock(tally);
        tally.ops += ops.iter().sum::<u64>();
        tally.losses_named += u64::from(killed && named);
        drop(tally);
        anyhow::ensure!(why.is_empty(), "{why}");
        Ok(())
    }

    fn aggregator_of(&self, rank: u64) -> &str {
        let all = self.aggregators.len().max(1) as u64;
        let at = usize::try_from(rank % all).unwrap_or(0);
        self.aggregators.get(at).map_or("", String::as_str)
    }

    fn start(&self, rank: u64, program: &Path, logs: &Path) -> Result<Rank> {
        let out = logs.join(format!("{}-{rank}", self.name.rsplit_once('-').map_or("", |x| x.0)));
        let file =
            |kind: &str| File::create(out.with_extension(kind)).context("cannot create a log file");
        let child = Command::new(program)
            .arg("bench")
            .args(&self.flags)
            .arg(format!("--rank={rank}"))
            .arg(format!("--aggregator={}", self.aggregator_of(rank)))
            .stdin(Stdio::null())
            .stdout(file("out")?)
            .stderr(file("err")?)
            .spawn()
            .context("cannot start a rank")?;
        Ok(Rank { child, out })
    }
}

/// Returns how many of the ops that a rank reports had correct sums, and how many had wrong ones.
fn checked(out: &str) -> (u64, u64) {
    // A killed rank may have left half a line.
    let rows = out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let (right, wrong): (Vec<_>, Vec<_>) = rows.partition(|row| row["wrong"] == 0);
    (right.len() as u64, wrong.len() as u64)
}

/// Returns whether an error names `rank` as lost or as not joined, alone or in a list.
fn names(errors: &str, rank: usize) -> bool {
    let is_list = |at: char| at.is_ascii_digit() || [',', ' '].contains(&at);
    errors.split("rank").skip(1).any(|rest| {
        let (list, numbers) = rest.strip_prefix('s').map_or((rest, 1), |list| (list, usize::MAX));
        let list = list.split(|at| !is_list(at)).next().unwrap_or("");
        list.split(", ").take(numbers).any(|number| number.trim().parse() == Ok(rank))
    })
}

impl Rank {
    /// Waits until the process ends. Kills a process that outlives `PATIENCE`, and returns an
    /// error.
    fn wait(&mut self) -> Result<ExitStatus> {
        let patience = Deadline::after(PATIENCE);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if patience.is_over() {
                self.child.kill().context("cannot kill a rank that hangs")?;
                self.child.wait()?;
                anyhow::bail!("a rank hangs: it has not ended after {} s", PATIENCE.as_secs());
            }
            sleep(POLL);
        }
    }

    /// Returns the rank's standard output and standard error.
    fn output(&self) -> Result<(String, String)> {
        let read = |kind: &str| std::fs::read_to_string(self.out.with_extension(kind));
        Ok((read("out")?, read("err")?))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // `kill` fails if the process has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

const POLL: Duration = Duration::from_millis(10);
/// Timeout of a rank, longer than any op or join may take.
const PATIENCE: Duration = Duration::from_secs(150);

#[cfg(test)]
mod tests {
    use super::{checked, names};

    #[test]
    fn ops_are_counted_by_whether_their_sums_were_right() {
        assert_eq!(checked(""), (0, 0));
        let rows = "{\"bytes\":8,\"wrong\":0}\n{\"wrong\":3}\n{\"wrong\":0}\n";
        assert_eq!(checked(rows), (2, 1));
        assert_eq!(checked(&format!("{rows}{{\"wrong\":")), (2, 1), "half a line must not count");
        assert_eq!(checked("{\"bytes\":8}\n"), (0, 1), "a row without `wrong` must count as wrong");
    }

    #[test]
    fn a_rank_is_named_as_itself_and_in_a_list() {
        for error in ["rank 2 was lost", "ranks 0, 2 were lost", "ranks 2, 3 have not joined"] {
            assert!(names(error, 2), "{error}");
            assert!(!names(error, 1), "{error}");
        }
        assert!(!names("rank 12 was lost; op 2 timed out", 2));
        assert!(!names("rank 1, 2 ops are not done", 2));
        assert!(!names("ranks 0, 1 were lost, 2 ops are not done", 2));
        assert!(!names("", 0));
    }
}
