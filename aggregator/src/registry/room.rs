//! The room for jobs: shares of the packet buffers, and the slots that these shares hold.

use std::net::IpAddr;

use racksum_proto::control::{Join, POOL_SLOTS};
use racksum_proto::job_name::JobName;

use super::Registry;
use super::job::Job;
use super::member::Member;
use crate::quotas::{ROUNDING, Refusal, Tally, Tenant, buffers_of_slot, check_room};

impl Registry {
    /// Returns the share of each shard's packet buffers, in per cent, that a job would be granted
    /// now.
    ///
    /// # Errors
    /// There is no room for the job.
    pub(super) fn find_share(
        &self,
        join: &Join,
        identity: Option<&str>,
        ip: IpAddr,
    ) -> Result<f64, Refusal> {
        let wanted = Tenant::new(&self.config, &join.job, identity, (join.world, join.lanes));
        let mut held = self.held_beside(&join.job);
        check_room(&self.config, &held, &wanted)?;
        if !self.jobs.contains_key(&join.job) {
            // A job whose turn has come keeps its room even if none of its ranks has joined yet.
            let called = self.queue.called_before(&self.config, join, identity, ip);
            held.extend(called.filter(|it| !self.jobs.contains_key(it.name)));
            if check_room(&self.config, &held, &wanted).is_err() {
                let why = "the free room is reserved for jobs that were already waiting";
                return Err(Refusal::NoRoom(why.into()));
            }
        }
        Ok(Tally::of(&self.config, &held).share_of(&self.config, &wanted))
    }

    /// Returns the number of slots of each stream of a job: as many as its share of the packet
    /// buffers holds, but no more than its ranks ask for or its limit allows.
    pub(super) fn slots(&self, name: &JobName, job: &Job) -> u32 {
        let tenant = job.tenant(&self.config, name);
        let ranks = u16::try_from(job.order.len()).unwrap_or(job.world);
        let affordable = self.affordable_slots(job.share, job.lanes, ranks);
        let joins = job.members.iter().flatten().flat_map(Member::joins);
        let asked = joins.map(|join| join.pool_slots);
        let asked = asked.filter(|slots| *slots > 0).min().unwrap_or(u32::MAX);
        affordable.min(asked).min(tenant.pool_slots(&self.config))
    }

    /// Returns how many slots of each stream a share of the packet buffers holds, in per cent.
    fn affordable_slots(&self, share: f64, lanes: u8, ranks: u16) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count from 0 to 2^24"
        )]
        let buffers = (self.config.buffers() as f64 * share / 100.0 + ROUNDING) as u32;
        buffers / (u32::from(lanes.max(1)) * buffers_of_slot(&self.config, ranks))
    }

    /// Checks that this aggregator would admit a join now. The caller has `identity`, or asks for a
    /// rank that has it. A rank may also follow others of its job that have moved here. An
    /// aggregator, which asks before any rank has moved, may not: such a job is another one.
    ///
    /// # Errors
    /// Returns the reason for the refusal.
    pub(crate) fn check_space(
        &self,
        join: &Join,
        identity: Option<&str>,
        ip: IpAddr,
    ) -> Result<(), Refusal> {
        if self.config.parent.is_some() && join.resume.is_some() {
            return Err(Refusal::Never("it has a parent, so no running job can move to it".into()));
        }
        self.admit(join, identity, ip)?;
        self.check_data(join)?;
        self.check_multicast(join, ip)?;
        let name = &join.job;
        if let Some(job) = self.jobs.get(name) {
            // A rank keeps its job's secret from an aggregator that it only asks.
            let known = || Join { secret: job.secret, ..join.clone() };
            let follows = job.moved_at.is_some()
                && join.begun_by.is_none()
                && job.generation == join.generation
                && job.check(&known()).is_ok();
            let other = || format!("it already serves a job with the name {name:?}");
            return if follows { Ok(()) } else { Err(Refusal::Never(other())) };
        }
        let share = self.find_share(join, identity, ip)?;
        if self.affordable_slots(share, join.lanes, join.world) < *POOL_SLOTS.start() {
            return Err(Refusal::NoRoom(format!(
                "the share of job {name:?} holds too few packet buffers; raise --pool-mib or lower \
                 --max-jobs there"
            )));
        }
        Ok(())
    }
}
