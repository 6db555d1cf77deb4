// The purposes of the recommenders' random streams, beside those of llmc/base/rng.h. Changing a value changes every run.
#ifndef DEV_RECSYS_SITES_H
#define DEV_RECSYS_SITES_H

enum { SITE_DROPOUT_RELU = 11, SITE_NEGATIVE = 12, SITE_RIVAL = 13, SITE_CLICK = 14 };

#endif
