//! The message with which a rank joins a job.

use racksum_proto::control::{CONTROL_VERSION, Join, Resume};

use crate::options::ConnectOptions;

/// Returns a rank's join message for one aggregator. `stripe` is the aggregator's index and the
/// number of aggregators. The caller adds the ports and limits of the data path.
pub(crate) fn join_message(
    options: &ConnectOptions,
    stripe: (u8, u8),
    resume: Option<&Resume>,
) -> Join {
    Join {
        version: CONTROL_VERSION,
        job: options.job_name(),
        generation: options.generation,
        rank: options.rank,
        world: options.world,
        lanes: options.lanes,
        data_ports: Vec::new(),
        receive_buffer: 0,
        max_datagram: 0,
        multicast: options.multicast,
        data_auth: options.data_auth,
        stripe,
        pool_slots: options.pool_slots,
        wait: options.wait,
        on_rank_loss: options.on_rank_loss,
        may_move: !options.standbys.is_empty(),
        aggregates: !options.also.is_empty(),
        secret: options.secret,
        begun_by: None,
        rejoin: options.rejoin && resume.is_none(),
        resume: resume.cloned(),
    }
}
