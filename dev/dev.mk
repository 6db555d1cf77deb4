# Programs of development: tests, checks of GPU code, ladders and exercises, the recommenders. Included by the Makefile.

.PHONY: read ops emulated grad bench exercise ladder san run-san mutants cubins recsys recsys-test

# The recommenders (dev/recsys): the trainers, and tests in float and in double.
RECSYS := $(addprefix $(B)/train_,dlrm ncf)
RECSYS_TESTS := $(addprefix $(B)/test_,dlrm ncf dlrm_double ncf_double)

# Where CUDA's headers are, CUDA programs can be built for the CPU too (dev/emulator/emulator.h).
CUDA_H := $(if $(HAS_NVCC),$(patsubst %/cublasLt.h,%,$(wildcard $(TOOLKIT)/include/cublasLt.h)))
E      := $(B)/emulated/$(PRECISION)
EMULATED := $(addprefix $E/,ops_80 ops_90a)

# What tests train on: made by dev/test/text.py, the same bytes every time.
TEST_CORPUS := build/test_corpus/builtin/train.bin

$(addprefix $(B)/test_,gpt2 bert gpt2_double bert_double run profile data data_tsan choices fuzz): $(PAGES)
$(RECSYS) $(RECSYS_TESTS): $(PAGES)
$(addprefix $(G)/,$(GPU_PROGRAMS) test_gpt2cu test_bertcu train_dlrmcu test_dlrmcu train_ncfcu test_ncfcu): $(PAGES)

# They use a part of a trainer's source.
$(B)/test_bert $(B)/test_bert_double: WARN += -Wno-unused-function

$(addprefix $(G)/,$(GPU_PROGRAMS) test_gpt2cu test_bertcu): $(G)/%cu: %.cu Makefile dev/dev.mk $(G)/command
	$(NVCC) $(NVFLAGS) $(COMMIT) -MF $@.d $< -o $@ $(NVLIBS)

# The machine code of every program, architecture and precision, for dev/compare_sass.py. A warning is an error, a
# spilled register and a wgmma product that ptxas serializes included. `make cubins CUBINS=FOLDER` puts them elsewhere.
CUBINS ?= build/cubins
CUBIN_FILES := $(foreach p,$(notdir $(basename $(wildcard train_*.cu apps/*.cu))),\
               $(foreach a,80 90a 100,$(foreach r,bf16 fp16 fp32,$(CUBINS)/$p.$a.$r.cubin)))
cubins: $(CUBIN_FILES)
$(CUBIN_FILES): override ARCH = $(word 2,$(subst ., ,$(@F)))
$(CUBIN_FILES): override PTX =
$(CUBIN_FILES): override PRECISION = $(word 3,$(subst ., ,$(@F)))
$(CUBIN_FILES): $(PAGES) Makefile dev/dev.mk
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -MF $@.d -cubin $(wildcard $(addsuffix $(firstword $(subst ., ,$(@F))).cu,./ apps/)) -o $@ >$@.log 2>&1; \
	status=$$?; cat $@.log; [ $$status = 0 ] && ! grep -qiE 'warning|spill|serialized' $@.log || { rm -f $@; exit 1; }
-include $(wildcard $(CUBINS)/*.d)

$(G)/opscu: dev/ops.cu Makefile dev/dev.mk $(G)/command
	$(NVCC) $(NVFLAGS) -MF $@.d $< -o $@ $(NVLIBS)

# CUDA programs on the CPU: tests of ops with the kernels of sm_80 and of sm_90a, and of the models. Without glibc's
# fortified longjmp(), Ubuntu's default, which takes a switch to another stack for an error.
$(B)/emulated/source/made: $(shell find llmc apps dev/ops dev/recsys dev/test -name '*.h' -o -name '*.cuh') \
        dev/ops.cu dev/ptx.cuh $(wildcard *.cu apps/*.cu dev/emulator/*) Makefile dev/dev.mk
	python3 dev/emulator/translate.py $(@D)
	@touch $@

$E/ops_90a $(addprefix $E/,test_gpt2 test_bert train_gpt2 use_gpt2 train_bert finetune_bert): private EMULATE := -DHAS_SM90A
$(EMULATED) $(addprefix $E/,test_gpt2 test_bert train_gpt2 use_gpt2 train_bert finetune_bert): $(B)/emulated/source/made $(PAGES)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -D_GNU_SOURCE -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z) $(EMULATE) \
	    -I$(<D) -I. -Ibuild -isystem $(CUDA_H) $(patsubst -O3,-O2,$(CFLAGS)) -fno-strict-aliasing -no-pie -fno-pie \
	    -U_FORTIFY_SOURCE $(WARN) -Wno-unknown-pragmas -Wno-unused-parameter -Wno-psabi -Wno-maybe-uninitialized \
	    -include dev/emulator/emulator.h -x c++ $(<D)/$(if $(filter ops%,$(@F)),dev/ops.cu,$(patsubst use%,apps/use%,$(@F:finetune%=apps/finetune%)).cu) -o $@ -ldl

# All rungs for GPUs in one compilation, whether or not a GPU is here.
$(G)/ladders.cubin: $(wildcard dev/ladder/*/*.cuh dev/ladder/*/rungs.txt) dev/ladder/run.sh \
        Makefile dev/dev.mk $(G)/command
	bash dev/ladder/run.sh --source >$(G)/ladders.cu
	$(NVCC) $(NVFLAGS) -MF $@.d -cubin $(G)/ladders.cu -o $@

$(B)/test_gpt2 $(B)/test_bert: $(B)/%: %.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/ops: dev/ops.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

# One op alone, in seconds: dev/ops.cu with its row only.
$(B)/one_op/%.cu: dev/ops.cu
	@mkdir -p $(@D)
	@grep -q '^    {"$*",' $< || { echo "no op is called $*; build/ops test NAME lists them" >&2; exit 1; }
	sed '/^    {"/{/^    {"$*",/!d}' $< >$@

$(B)/one_op/%: $(B)/one_op/%.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) -MF $@.d -Idev -O2 -Wno-unused-function -Wno-unused-const-variable $< -o $@ $(LIBS)
-include $(wildcard $(B)/one_op/*.d)
$(B)/one_op/%.d: ;

# The double build: finite differences are sharp there.
$(B)/%_double: %.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

$(B)/%_double: dev/%.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

$(B)/test_dlrm $(B)/test_ncf: $(B)/test_%: dev/recsys/test_%.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(B)/test_dlrm_double $(B)/test_ncf_double: $(B)/test_%_double: dev/recsys/test_%.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) -DREAL_DOUBLE $< -o $@ $(LIBS)

$(RECSYS): $(B)/train_%: dev/recsys/train_%.cu Makefile dev/dev.mk $(B)/command
	$(COMPILE) $(COMMIT) $< -o $@ $(LIBS)

RECSYS_GPU := $(addprefix $(G)/,train_dlrmcu train_ncfcu)
$(RECSYS_GPU) $(addprefix $(G)/,test_dlrmcu test_ncfcu): $(G)/%cu: dev/recsys/%.cu Makefile dev/dev.mk $(G)/command
	$(NVCC) $(NVFLAGS) -MF $@.d $< -o $@ $(NVLIBS)

# Trainers whose collectives run as late as possible.
$(B)/late/train_%: train_%.cu Makefile dev/dev.mk $(B)/command $(PAGES)
	@mkdir -p $(@D)
	$(COMPILE) -MF $(B)/late_$*.d -include dev/test/late.h $< -o $@ $(LIBS)

# Without OpenMP, whose synchronisation ThreadSanitizer does not see.
$(B)/test_data_tsan: dev/test/data.c Makefile dev/dev.mk $(B)/command
	$(CC) -x c -std=c11 $(CPP) -O1 -g -fsanitize=thread $(WARN) -Wno-unknown-pragmas $< -o $@ $(LIBS)

$(B)/test_%: dev/test/%.c Makefile dev/dev.mk $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

$(TEST_CORPUS): dev/test/text.py
	rm -rf build/test_corpus
	python3 $< build/test_corpus

# What dev/test/run.sh gets; it builds what the suites need, with the variables of this command line.
SUITES = B=$(B) T=$(or $(TOP:/=),.) E=$E CUDA_H=$(CUDA_H) CORPUS=$(TEST_CORPUS) MAKE_VARIABLES='$(MAKEOVERRIDES)' \
         MAKEFLAGS= bash dev/test/run.sh

ops: $(if $(OP),$(B)/one_op/$(OP),$(B)/ops)
	$< test $(OP)

emulated: $(if $(CUDA_H),$(EMULATED))
	@$(if $(CUDA_H),:,echo "make emulated needs CUDA's headers; nvcc was not found" >&2; exit 1)
	bash dev/emulator/test.sh $E $(OP)

grad: $(B)/ops_double $(B)/test_gpt2_double $(B)/test_bert_double
	$(B)/ops_double grad $(OP)
	$(B)/test_gpt2_double
	$(B)/test_bert_double

bench: $(B)/ops
	$(B)/ops bench $(OP)

ladder:
	@CC="$(CC)" CFLAGS="$(CFLAGS)" NVCC="$(NVCC)" NVFLAGS="$(filter-out -MMD -MP,$(NVFLAGS))" MAKEFLAGS= \
	bash dev/ladder/run.sh $(OP)

exercise:
	@CC="$(CC)" CFLAGS="$(CFLAGS)" MAKEFLAGS= bash dev/exercises/run.sh $(OP)

san:
	@$(MAKE) --no-print-directory build/builtin_corpus
	@$(MAKE) --no-print-directory SANITIZE=1 run-san

run-san:
	@$(SUITES) san

recsys: $(RECSYS) $(if $(HAS_NVCC),$(RECSYS_GPU))

recsys-test: $(RECSYS) $(RECSYS_TESTS) $(TEST_CORPUS)
	@for test in $(RECSYS_TESTS); do $$test || exit 1; done
	@bash dev/recsys/trainer.sh $(RECSYS)

# What a plain training step runs, in the order to read it.
read: build/profile_page.inc build/explain_page.inc data/builtin/train.bin
	@python3 dev/corridor.py --list train_gpt2.cu

mutants:
	@MAKEFLAGS= python3 dev/mutants.py --jobs $(or $(JOBS),1)
