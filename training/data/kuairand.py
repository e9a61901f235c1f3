"""The schema of KuaiRand's logs, as published (kuairand.com): 27K, 1K and Pure differ in size only."""

from __future__ import annotations

COLUMNS = (
    "user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "is_comment", "is_forward",
    "is_hate", "long_view", "play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time",
    "is_profile_enter", "is_rand", "tab",
)  # fmt: skip
EARLIER = "log_standard_4_08_to_4_21"
LATER = "log_standard_4_22_to_5_08"
RANDOM = "log_random_4_22_to_5_08"  # videos shown at random instead of by the recommender
VERSIONS = ("27k", "1k", "pure")  # end of a file's name, before _part1 and so on
