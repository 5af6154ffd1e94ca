//! One rank of a reduction. It reads its file tensor by tensor, keeps several in flight, and writes
//! the results in the same order.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use racksum_net::clock::Clock;
use racksum_proto::counted::counted;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::OpError;
use racksum_proto::ids::Rank;
use racksum_worker::{Blocks, Client, Error, Handle, Reduced, Stats};

use super::Args;
use super::file::{Digest, GradientFile, Tensor, header_of};
use super::quoted::Quoted;
use super::report::{Report, Table};
use super::survey::{Held, Survey};
use crate::exit::{Failure, with_flags};
use crate::member::Member;
use crate::memory;
use crate::out_file::{OutFile, cannot_write};
use crate::progress::{self, Line, Work};

/// Refuses a file if this host lacks the memory to reduce its tensors with `ranks` ranks.
///
/// Counts the tensors in flight, which a rank reads whole and replaces with their sums. Leaves out
/// packets, whose buffers have a fixed size, and the survey, which needs one byte for each block.
pub(super) fn check_memory(file: &GradientFile, ranks: u16) -> Result<(), Failure> {
    let tensors = || file.tensors.iter().map(|tensor| tensor.len as u64);
    let (most, all) = (tensors().max().unwrap_or(0), tensors().sum::<u64>());
    let what = format!("the tensors of {} (at most {most} bytes each)", file.path.display());
    let advice = match ranks {
        1 => "split the largest tensors",
        _ => "split the largest tensors, or run each rank on a host of its own with --rank",
    };
    memory::check_host(&what, all.min(most.max(MAX_BYTES as u64)), ranks, advice)
}

/// Runs one rank of a distributed reduction.
pub(super) fn run(args: &Args, member: &Member, path: &Path) -> Result<(), Failure> {
    let file = GradientFile::open(path)?;
    check_memory(&file, 1)?;
    args.warn_unnarrowed(&file)?;
    let mut out = args.out.as_deref().map(OutFile::create).transpose()?;
    if let Some(out) = &out {
        out.remove_at_signal()?;
    }
    let standby = args.standby.start(member)?;
    let report = reduce(args, member, &file, out.as_mut().map(OutFile::file));
    if let Some(standby) = standby {
        standby.finish(args.timeout);
    }
    let report = report?;
    if let Some(out) = out {
        out.commit()?;
    }
    let rank = Some((member.rank, member.world));
    Table { args, tensors: &file.tensors, rank, reports: &[report] }.print()
}

/// Runs one rank of a reduction on this host. The parent process creates the output file.
pub(super) fn run_for_parent(args: &Args, member: &Member, path: &Path) -> Result<Report, Failure> {
    let file = GradientFile::open(path)?;
    let mut out = match &args.into {
        None => None,
        Some(into) => {
            let named = args.out.as_deref().unwrap_or(into);
            let opened = File::options().write(true).open(into);
            Some(opened.map_err(|error| cannot_write(named, &error))?)
        }
    };
    reduce(args, member, &file, out.as_mut())
}

/// Reduces all tensors of a file.
fn reduce(
    args: &Args,
    member: &Member,
    file: &GradientFile,
    out: Option<&mut File>,
) -> Result<Report, Failure> {
    let descriptors = args.descriptors(file)?;
    let client = progress::connect(&args.connect_options(member))?;
    let held = agree(&client, member, file, &descriptors)?;
    let (clock, before) = (Clock::start(), client.stats());
    let start = clock.now();
    let out = out.zip(args.out.as_deref());
    let out = out.map(|(out, path)| Writer::start(out, path, &file.tensors)).transpose()?;
    let mut pipeline = Pipeline {
        client: &client,
        file,
        in_flight: VecDeque::new(),
        bytes: 0,
        digest: Digest::new(),
        absent: Vec::new(),
        out,
        work: Work::new(file.tensors.iter().map(|tensor| tensor.len as u64).sum()),
    };
    // All ranks on this host share a terminal, so only rank 0 draws a line.
    let shows_progress = !args.raw || member.rank == 0;
    let work = Arc::clone(&pipeline.work);
    let line = shows_progress
        .then(|| Line::start(move |passed| format!("reducing: {}", work.text(passed))));
    pipeline.run(&descriptors)?;
    drop(line);
    let (digest, absent) = (pipeline.digest.value(), pipeline.absent);
    if let Some(out) = pipeline.out {
        out.finish()?;
    }
    let time_us = clock.now().since(start).0 as f64 / 1e3;
    let after = client.stats();
    let since = |of: fn(&Stats) -> u64| of(&after) - of(&before);
    Ok(Report {
        held,
        absent,
        digest,
        shards: client.grant().shards,
        multicast: client.grant().multicast,
        tx_bytes: since(|stats| stats.tx_bytes),
        rx_bytes: since(|stats| stats.rx_bytes),
        retransmits: since(|stats| stats.retransmits),
        kernel_drops: since(|stats| stats.kernel_drops),
        time_us,
    })
}

/// Runs the survey: counts the blocks that the ranks hold, and checks that all ranks have the same
/// tensors.
fn agree(
    client: &Client,
    member: &Member,
    file: &GradientFile,
    descriptors: &[Descriptor],
) -> Result<Vec<Held>, Failure> {
    let survey = Survey::new(descriptors, member.world);
    let mut words = survey.encode(member.rank, file)?;
    match client.reduce(&mut words, survey.descriptor()) {
        Ok(_) => Ok(survey.decode(&words)),
        Err(Error::Op(OpError::Mismatch { one, other, .. })) => {
            if let Some(stranger) = [one, other].into_iter().find(|one| !Survey::may_be(&one.1)) {
                return Err(is_no_reduction(stranger));
            }
            let counts = [one, other].map(|(_, descriptor)| Survey::tensors_of(descriptor.tag));
            let ranks = [one, other].map(|(rank, _)| rank.0);
            Err(difference(client, file, descriptors, ranks, counts))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the failure for a rank that runs another command in this job.
fn is_no_reduction((rank, has): (Rank, Descriptor)) -> Failure {
    Failure::failed(format!(
        "rank {} of the job does not run `racksum reduce`: it has {has}; give each command its own \
         --job",
        rank.0
    ))
}

/// Returns the failure for two ranks that disagree. It names the first tensor or the flags that
/// differ, or the numbers of tensors. To compare a tensor, submits an op with the tensor's
/// descriptor but without blocks, which sends almost nothing.
fn difference(
    client: &Client,
    file: &GradientFile,
    descriptors: &[Descriptor],
    ranks: [u16; 2],
    counts: [u64; 2],
) -> Failure {
    let [one, other] = ranks;
    let both = usize::try_from(counts[0].min(counts[1])).unwrap_or(usize::MAX);
    for (tensor, descriptor) in file.tensors.iter().zip(descriptors).take(both) {
        let nothing = client.submit(Blocks::default(), *descriptor);
        match nothing.and_then(|handle| handle.wait()) {
            Ok(_) => {}
            Err(Error::Op(error @ OpError::Mismatch { one, other, .. })) => {
                if let Some(why) = other_flags(one, other) {
                    return Failure::failed(why);
                }
                return Failure::failed(format!(
                    "tensor {} differs between ranks: {}",
                    Quoted(&tensor.name),
                    Mismatch(&error)
                ));
            }
            // A rank with fewer tensors may have found no difference and left.
            Err(_) => break,
        }
    }
    if counts[0] == counts[1] {
        return Failure::failed(format!("the tensors of rank {one} and rank {other} differ"));
    }
    Failure::failed(format!(
        "rank {one} has {}, but rank {other} has {}",
        counted(counts[0], "tensor"),
        counts[1]
    ))
}

/// Names the flags that differ between two ranks, or returns `None` if their tensors differ.
fn other_flags(
    (one, mine): (Rank, Descriptor),
    (other, theirs): (Rank, Descriptor),
) -> Option<String> {
    let Descriptor { reduction, wire, block_log2, .. } = theirs;
    if (Descriptor { reduction, wire, block_log2, ..mine }) != theirs {
        return None;
    }
    let flags = [
        (mine.reduction != reduction, "--op"),
        (mine.wire != wire, "--wire"),
        (mine.block_log2 != block_log2, "--block"),
    ];
    let flags: Vec<_> = flags.into_iter().filter(|flag| flag.0).map(|flag| flag.1).collect();
    Some(format!(
        "the ranks have different {}: rank {} has {mine}; rank {} has {theirs}; give all ranks the \
         same flags",
        flags.join(" and "),
        one.0,
        other.0
    ))
}

/// A disagreement about a tensor, formatted for the user.
struct Mismatch<'a>(&'a OpError);

impl std::fmt::Display for Mismatch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let OpError::Mismatch { one: (one, mine), other: (other, theirs), .. } = self.0 else {
            return write!(f, "{}", self.0);
        };
        if (Descriptor { tag: theirs.tag, ..*mine }) == *theirs {
            return write!(
                f,
                "rank {} and rank {} give it different names or shapes",
                one.0, other.0
            );
        }
        write!(f, "rank {} has {mine}; rank {} has {theirs}", one.0, other.0)
    }
}

/// The tensors in flight, oldest first.
struct Pipeline<'a> {
    client: &'a Client,
    file: &'a GradientFile,
    in_flight: VecDeque<(usize, Handle<Vec<u8>>)>,
    /// Total size of the tensors in flight, in bytes.
    bytes: usize,
    digest: Digest,
    absent: Vec<Vec<u16>>,
    out: Option<Writer<'a>>,
    /// Progress, in bytes of tensors.
    work: Arc<Work>,
}

impl Pipeline<'_> {
    /// Reduces all tensors.
    fn run(&mut self, descriptors: &[Descriptor]) -> Result<(), Failure> {
        let max_ops = usize::from(self.client.grant().max_ops.max(1));
        for (i, descriptor) in descriptors.iter().enumerate() {
            let tensor = &self.file.tensors[i];
            while !self.in_flight.is_empty()
                && (self.in_flight.len() >= max_ops || self.bytes + tensor.len > MAX_BYTES)
            {
                self.finish_oldest()?;
            }
            let mut contents = memory::zeros(tensor.len)?;
            self.file.read(tensor, 0, &mut contents)?;
            let submitted = self.client.submit(contents, *descriptor);
            let handle = submitted.map_err(|error| of_tensor(tensor, error))?;
            self.in_flight.push_back((i, handle));
            self.bytes += tensor.len;
        }
        while !self.in_flight.is_empty() {
            self.finish_oldest()?;
        }
        Ok(())
    }

    /// Waits for the sum of the oldest tensor in flight, and writes it if this rank has an output
    /// file.
    fn finish_oldest(&mut self) -> Result<(), Failure> {
        let Some((i, handle)) = self.in_flight.pop_front() else { return Ok(()) };
        let tensor = &self.file.tensors[i];
        let Reduced { tensor: sum, absent } =
            handle.wait().map_err(|error| of_tensor(tensor, error))?;
        self.absent.push(absent.into_iter().map(|rank| rank.0).collect());
        self.bytes -= tensor.len;
        self.work.advance(tensor.len as u64);
        self.digest.add(&sum);
        if let Some(out) = &mut self.out {
            out.add(&sum)?;
        }
        Ok(())
    }
}

/// Writer of the result file: the header, then the tensors in order.
struct Writer<'a> {
    to: BufWriter<&'a mut File>,
    /// The path of the result, for errors.
    path: &'a Path,
}

impl<'a> Writer<'a> {
    fn start(file: &'a mut File, path: &'a Path, tensors: &[Tensor]) -> Result<Self, Failure> {
        let mut writer = Self { to: BufWriter::new(file), path };
        writer.add(&header_of(tensors)?)?;
        Ok(writer)
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.to.write_all(bytes).map_err(|error| cannot_write(self.path, &error))
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.to.flush().map_err(|error| cannot_write(self.path, &error))
    }
}

/// Returns the failure for a tensor that was not reduced.
fn of_tensor(tensor: &Tensor, error: Error) -> Failure {
    let why = match &error {
        Error::Op(mismatch @ OpError::Mismatch { .. }) => Mismatch(mismatch).to_string(),
        other => with_flags(other),
    };
    Failure { why: format!("tensor {}: {why}", Quoted(&tensor.name)), ..Failure::from(error) }
}

/// Maximum total size of the tensors in flight, in bytes. A larger tensor is reduced alone.
const MAX_BYTES: usize = 256 << 20;
