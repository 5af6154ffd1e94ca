//! Received datagrams: their job, their authenticity, and where their payload is stored.

use std::collections::BTreeMap;

use racksum_net::udp::{self, Received};
use racksum_proto::aggregator::FragmentPlace;
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::observer::EventCounts;
use racksum_proto::path;
use racksum_proto::reject::Reject;
use racksum_proto::schedule::{DeficitRoundRobin, Schedule, cost};
use racksum_proto::time::Time;
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{self, Header, Kind};

use super::floods::Floods;
use super::{Shard, ShardJob, parent_stream};
use crate::slots::Slots;

impl Shard {
    /// Handles a buffer of datagrams that the kernel joined. They come from one sender and lie
    /// `stride` bytes apart.
    pub(super) fn take_datagrams(&mut self, now: Time, i: usize, meta: &Received) {
        let Self { jobs, schedule, parent_jobs, stats, incoming, arena, proofs, floods, .. } = self;
        let buffer = &mut incoming[i];
        // The kernel joins datagrams only if they have the same sender.
        let below = |origin: Option<(JobId, Rank)>| {
            let (job, _) = origin.filter(|(_, sender)| *sender == Rank::AGGREGATOR)?;
            parent_jobs.get(&(job, meta.from)).copied()
        };
        let count = buffer.len().div_ceil(meta.stride.max(1));
        stats.datagrams.received += count as u64;
        stats.bytes.received += buffer.len() as u64;
        let mut stores = [None; udp::MAX_SEGMENTS];
        // The kernel may join more datagrams than a window has fragments.
        let first = Header::origin(buffer);
        let first = below(first).or_else(|| first.map(|(job, _)| job)).and_then(|id| jobs.get(&id));
        let trailer = first.map_or(0, |job| job.machine.config().cut.trailer());
        let whole = count <= stores.len() && may_be_whole(buffer, meta.stride, trailer);
        for (n, datagram) in buffer.chunks_mut(meta.stride.max(1)).enumerate() {
            if path::Datagram::is_one(datagram) {
                floods.note_arrived();
                if !proofs.take(&self.socket, meta.from, datagram, stats) {
                    floods.note_unproven(meta.from);
                }
                continue;
            }
            let origin = Header::origin(datagram);
            let below = below(origin);
            let opened = match below.and_then(|id| jobs.get_mut(&id)) {
                Some(job) => parent_stream::open(job, datagram),
                None => open(jobs, schedule, floods, datagram, meta),
            };
            let Some(messages) = opened else {
                floods.note_arrived();
                continue;
            };
            for message in wire::messages(messages) {
                floods.note_arrived();
                // wire: W-60
                let message = message.and_then(|(header, body)| {
                    let same = origin.is_some_and(|(job, sender)| header.is_of(job, sender));
                    if same { Ok((header, body)) } else { Err(Reject::Sender) }
                });
                let taken = match below.and_then(|id| Some((id, jobs.get_mut(&id)?))) {
                    Some((id, job)) => {
                        if let Ok((header, _)) = &message {
                            schedule.charge(id, cost::of_message(header.kind));
                        }
                        let taken = parent_stream::take(job, now, message, meta.ce);
                        taken.map(|(place, body)| (id, place, body))
                    }
                    None => {
                        let events = &mut stats.events;
                        take_message(jobs, schedule, floods, events, now, message, meta)
                    }
                };
                let Some((id, place, body)) = taken else { continue };
                if whole {
                    stores[n] = Some((id, place));
                } else if let Some(job) = jobs.get_mut(&id) {
                    job.slots.copy(place, body, arena);
                }
            }
        }
        if whole {
            self.keep_or_copy(i, meta.stride, &stores[..count]);
        }
    }

    /// Keeps a buffer that holds a whole contribution; otherwise copies the wanted fragments.
    fn keep_or_copy(&mut self, i: usize, stride: usize, stores: &[Option<(JobId, FragmentPlace)>]) {
        let Self { jobs, incoming, arena, .. } = self;
        if let Some((id, place)) = whole_window(stores)
            && let Some(job) = jobs.get_mut(&id)
            && Slots::fits(&place, stride)
            && let Some(fresh) = arena.take()
        {
            let buffer = std::mem::replace(&mut incoming[i], fresh);
            if let Some(old) = job.slots.keep(place, buffer) {
                arena.give(old);
            }
            return;
        }
        for (datagram, store) in incoming[i].chunks(stride.max(1)).zip(stores) {
            let Some((id, place)) = store else { continue };
            let Some(job) = jobs.get_mut(id) else { continue };
            let end = datagram.len().saturating_sub(place.cut.trailer());
            if let Some(body) = datagram.get(Header::LEN..end) {
                job.slots.copy(*place, body, arena);
            }
        }
    }
}

/// Hands a message to its job. Returns the message's body and the place to store it, if the body
/// must be stored.
fn take_message<'a>(
    jobs: &mut BTreeMap<JobId, ShardJob>,
    schedule: &mut DeficitRoundRobin<JobId>,
    floods: &mut Floods,
    events: &mut EventCounts,
    now: Time,
    message: Result<(Header, &'a [u8]), Reject>,
    meta: &Received,
) -> Option<(JobId, FragmentPlace, &'a [u8])> {
    let (header, body) = match message {
        Ok(message) => message,
        Err(reject) => {
            floods.note_unproven(meta.from);
            events.rejects.count(reject);
            return None;
        }
    };
    let Some(job) = jobs.get_mut(&header.job) else {
        floods.note_unproven(meta.from);
        events.rejects.count(Reject::Job);
        return None;
    };
    // wire: W-9
    if job.destinations.ranks.get(header.sender.index()) != Some(&meta.from) {
        floods.note_unproven(meta.from);
        job.events.rejects.count(Reject::Sender);
        return None;
    }
    let cost = cost::of_message(header.kind);
    match job.machine.handle_decoded(now, &header, body, meta.ce, &mut job.events) {
        // The job is charged for the stored bytes when they are folded.
        Verdict::Store(place) => {
            schedule.charge(header.job, cost);
            Some((header.job, place, body))
        }
        verdict @ (Verdict::Duplicate | Verdict::Control | Verdict::Reject(_)) => {
            // Opens do not count as useless: every op begins with one, and small ops consist of
            // little else.
            let begins = header.kind == Kind::Open && verdict == Verdict::Control;
            if !begins {
                floods.note_useless(meta.from);
            }
            schedule.charge(header.job, cost + body.len());
            None
        }
    }
}

/// Returns the messages of a datagram, if the datagram is authentic or its job does not
/// authenticate datagrams.
fn open<'a>(
    jobs: &mut BTreeMap<JobId, ShardJob>,
    schedule: &DeficitRoundRobin<JobId>,
    floods: &mut Floods,
    datagram: &'a mut [u8],
    meta: &Received,
) -> Option<&'a [u8]> {
    // Decoding rejects a datagram of an unknown job with the right reason.
    let Some((id, rank)) = Header::origin(datagram) else { return Some(datagram) };
    let Some(job) = jobs.get_mut(&id) else { return Some(datagram) };
    if schedule.debt(id) > job.most_debt {
        // Only messages that pass the checks below, and the work that they cause, increase the
        // debt. Beyond the maximum debt, the tag is not checked, so a datagram from a rank's
        // address counts against the rank, although the address may be forged.
        match job.destinations.ranks.get(rank.index()) {
            Some(addr) if *addr == meta.from => floods.note_useless(meta.from),
            _ => floods.note_unproven(meta.from),
        }
        job.events.rejects.count(Reject::Overdrawn);
        return None;
    }
    if job.openers.is_empty() {
        return Some(datagram);
    }
    // wire: W-9
    // The address is checked first, since that costs less than checking the tag.
    let sender = job.destinations.ranks.get(rank.index()).filter(|addr| **addr == meta.from);
    let opened = match (sender, job.openers.get_mut(rank.index())) {
        (Some(_), Some(opener)) => opener.open(datagram),
        _ => Err(Reject::Sender),
    };
    match opened {
        Ok(messages) => Some(messages),
        Err(reject) => {
            floods.note_unproven(meta.from);
            job.events.rejects.count(reject);
            None
        }
    }
}

/// Returns whether a buffer may hold the fragments of one window, one message per datagram.
fn may_be_whole(buffer: &[u8], stride: usize, trailer: usize) -> bool {
    buffer.chunks(stride.max(1)).all(|datagram| {
        let messages = datagram.len().checked_sub(trailer).and_then(|len| datagram.get(..len));
        messages.is_some_and(|message| Header::decode(message).is_ok())
    })
}

/// Returns the window that a buffer holds, if the buffer holds all fragments of one window in
/// order.
fn whole_window(stores: &[Option<(JobId, FragmentPlace)>]) -> Option<(JobId, FragmentPlace)> {
    let (job, first) = (*stores.first()?)?;
    if first.fragment != 0 || usize::from(first.fragments) != stores.len() {
        return None;
    }
    let in_order = stores
        .iter()
        .zip(0..)
        .all(|(store, fragment)| *store == Some((job, FragmentPlace { fragment, ..first })));
    in_order.then_some((job, first))
}
