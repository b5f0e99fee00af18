-- expand. What the feed of endings needs: the attempts after which a job went on, by their instants.

create index holdfast_attempt_setback on holdfast_attempt (ended_at) where state < 5;
