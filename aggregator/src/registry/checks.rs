//! Checks of a rank's join before the rank gets a place.

use std::net::IpAddr;

use racksum_proto::control::{CONTROL_VERSION, CallerId, Join};

use super::job::fragmentation_of;
use super::member::unreached;
use super::migration::check_resume;
use super::{Caller, MAX_LANES, Registry};
use crate::admit_rule;
use crate::config::{Fanout, MAX_SHARDS};
use crate::quotas::Refusal;
use crate::slots::MAX_WORLD;

impl Registry {
    /// Checks all parts of a rank's join that do not depend on the room that other jobs hold.
    pub(super) fn check_caller(&self, join: &Join, caller: &Caller) -> Result<(), Refusal> {
        self.admit(join, caller.identity.as_deref(), caller.addr.ip())?;
        self.check_data(join)?;
        self.check_multicast(join, caller.addr.ip())?;
        Ok(())
    }

    /// Checks that a join may be admitted, before any reply reveals whether the job exists.
    pub(super) fn admit(
        &self,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) -> Result<(), Refusal> {
        if join.version != CONTROL_VERSION {
            return Err(Refusal::WrongVersion(join.version));
        }
        self.check(join, addr)?;
        self.check_relay(join)?;
        if self.is_closed_to(join) {
            return Err(Refusal::Draining);
        }
        Ok(admit_rule::check(&self.config.admit, identity, &join.job.name)?)
    }

    /// Checks the parts of a join that do not depend on the job.
    pub(super) fn check(&self, join: &Join, addr: IpAddr) -> Result<(), String> {
        let (rank, world) = (join.rank, join.world);
        if world == 0 || world > MAX_WORLD {
            return Err(format!("a job must have 1 to {MAX_WORLD} ranks, not {world}"));
        }
        if rank >= world {
            return Err(format!("rank {rank} must be below the number of ranks, {world}"));
        }
        if join.lanes == 0 || join.lanes > MAX_LANES {
            return Err(format!("a job must have 1 to {MAX_LANES} lanes, not {}", join.lanes));
        }
        let (place, aggregators) = join.stripe;
        if place >= aggregators {
            return Err(format!(
                "aggregator index {place} must be below the number of aggregators, {aggregators}"
            ));
        }
        let mine = self.shards.len();
        if mine * usize::from(aggregators) > usize::from(u8::MAX) {
            return Err(format!(
                "{aggregators} aggregators with {mine} shards each exceed the limit of {} shards; \
                 lower --shards, or use fewer aggregators",
                u8::MAX
            ));
        }
        self.check_auth(join)?;
        join.job.check()?;
        join.begun_by.as_ref().map_or(Ok(()), CallerId::check)?;
        check_resume(join)?;
        if join.pool_slots == 1 {
            return Err("`pool_slots` must be at least 2, not 1".into());
        }
        other_ip_version(addr).map_or(Ok(()), Err)
    }

    /// Checks that this aggregator uses the data authentication that the rank asks for, if any.
    fn check_auth(&self, join: &Join) -> Result<(), String> {
        let own = self.config.data_auth();
        match join.data_auth {
            Some(wanted) if wanted != own && join.aggregates => Err(format!(
                "this aggregator authenticates data with {:?}, but the caller that joins for rank \
                 {} uses {:?}; set the same `data_auth` for both",
                own.name(),
                join.rank,
                wanted.name()
            )),
            Some(wanted) if wanted != own => Err(format!(
                "this aggregator authenticates data with {:?}, but rank {} asks for {:?}; set \
                 `data_auth` to the aggregator's",
                own.name(),
                join.rank,
                wanted.name()
            )),
            _ => Ok(()),
        }
    }

    /// Checks the data ports and datagram size of a rank. A caller that only asks which ranks are
    /// present gives neither.
    pub(super) fn check_data(&self, join: &Join) -> Result<(), String> {
        let (ports, datagram) = (&join.data_ports, join.max_datagram);
        if ports.is_empty() || ports.len() > usize::from(MAX_SHARDS) || ports.contains(&0) {
            return Err(format!(
                "a rank must give 1 to {MAX_SHARDS} UDP data ports, none of them 0"
            ));
        }
        if fragmentation_of(datagram.into()).is_none() {
            return Err(format!(
                "rank {} supports datagrams of at most {datagram} bytes, which is too small; raise \
                 its MTU to at least 1280",
                join.rank
            ));
        }
        Ok(())
    }

    /// Checks that a rank at `ip` listens to multicast, if results are sent only by multicast.
    pub(super) fn check_multicast(&self, join: &Join, ip: IpAddr) -> Result<(), String> {
        match self.config.fanout {
            Fanout::Multicast if !join.multicast => Err(unreached(join, ip)),
            _ => Ok(()),
        }
    }
}

/// Returns why data from the address of a call could not arrive, or `None` if it could. The control
/// socket accepts both IP versions. Each data socket accepts only one, so that a peer has a single
/// address.
pub(crate) fn other_ip_version(addr: IpAddr) -> Option<String> {
    let is_mapped = matches!(addr, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    is_mapped.then(|| {
        "this aggregator serves IPv6, but the worker called it over IPv4; call it at an IPv6 \
         address, or start it with --bind and an IPv4 address"
            .into()
    })
}
